"""The losses of a run, with cause, and with the injected fault if there was one. ``FleetMachine`` judges crash loops by them."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.machine.roster import Rank
from fleet.protocol.causes import Cause, TrainRaised
from fleet.protocol.facts import FaultRecord, ProcessLost
from fleet.protocol.topology import WINDOW_S
from fleet.protocol.types import Loss, Member

StepPlace = tuple[int, int]
"""Step and shard of a rank."""
NOWHERE: StepPlace = (-1, -1)


class Losses:
    """``all``: every loss of the run, in order. ``causes``: the losses since the last view."""

    def __init__(self) -> None:
        self.all: list[Loss] = []
        self.causes: list[str] = []
        self._raised_at: set[int] = set()
        self._recent: list[tuple[float, str, Member, bool]] = []
        self._injected: dict[Member, str] = {}

    def lost(
        self,
        rank: Rank,
        cause: Cause,
        at_s: float,
        generation: int,
        committed: int,
        detail: str,
        domain: str = "",
        where: StepPlace = NOWHERE,
    ) -> ProcessLost:
        """Note that ``rank`` is gone; returns the record of it. ``generation``: the rank's view, or -1.

        ``domain``: the domain path of its node, if the node is lost, too. ``where``: its step and shard.
        """
        fault = self._injected.pop(rank.member, None)
        record = ProcessLost(rank.member, cause, fault, generation, *where, detail, at_s=at_s)
        self.causes.append(str(rank.member))
        self._count(record, rank.process.node, committed, domain)
        return record

    def note(self, rank: Rank, in_view: bool, now_s: float) -> None:
        """Note for :meth:`of_nodes` that ``rank`` was lost now by a fault."""
        self._recent = [each for each in self._recent if each[0] >= now_s - WINDOW_S]
        self._recent.append((now_s, rank.process.node, rank.member, in_view))

    def of_nodes(self, nodes: Iterable[str], since_s: float) -> list[tuple[Member, bool]]:
        """(member, whether it was in the view) of losses on these nodes since ``since_s``, at most :data:`WINDOW_S` ago."""
        inside = set(nodes)
        return sorted((member, joined) for at_s, node, member, joined in self._recent if node in inside and at_s >= since_s)

    def _count(self, record: ProcessLost, node: str, committed: int, domain: str = "") -> None:
        if isinstance(record.cause, TrainRaised):
            self._raised_at.add(record.step)
        detail = record.detail or str(record.cause)
        where = record.member.slot, node, record.at_s, record.step, record.shard
        self.all.append(Loss(*where, record.fault is not None, detail, committed, domain))

    def raised_before(self, step: int) -> bool:
        """Whether the train function of any rank raised at this step before."""
        return step in self._raised_at

    def injected(self, members: Iterable[Member]) -> bool:
        """Whether an injected fault has hit one of these members."""
        return any(member in self._injected for member in members)

    def healed(self, members: Iterable[Member]) -> None:
        """Forget the injected faults of these members, whose whole state was replaced."""
        for member in members:
            self._injected.pop(member, None)

    def aimed(self, event: FaultRecord, present: tuple[Member, ...]) -> None:
        """A fault is aimed at ranks; ``present`` are alive. Their deaths count as injected until the fault has healed."""
        if event.phase in ("aimed", "executed"):
            self._injected.update(dict.fromkeys(present, event.fault.id))
        else:
            self.healed(member for member in event.members if self._injected.get(member) == event.fault.id)

    def replay_loss(self, record: ProcessLost, rank: Rank, committed: int) -> None:
        self._injected.pop(record.member, None)
        self._count(record, rank.process.node, committed)
