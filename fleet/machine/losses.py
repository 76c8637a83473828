"""Who was lost, why, and whether chaos did it: what ``FleetMachine`` judges crash loops by."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.machine.roster import Rank
from fleet.protocol.causes import Cause, TrainRaised
from fleet.protocol.facts import FaultRecord, ProcessLost
from fleet.protocol.topology import WINDOW_S
from fleet.protocol.types import Loss, Member

StepPlace = tuple[int, int]
"""Step and shard that a rank was at."""
NOWHERE: StepPlace = (-1, -1)


class Losses:
    """``all`` is every loss of the run, in order; ``causes`` are those that no view has answered yet."""

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
        """Note that ``rank`` is gone; returns what the journal should hold. ``generation``: the view it was in, or -1.

        ``domain``: the path of its node, where it is lost with that. ``where``: its step and shard.
        """
        fault = self._injected.pop(rank.member, None)
        record = ProcessLost(rank.member, cause, fault, generation, *where, detail, at_s=at_s)
        self.causes.append(str(rank.member))
        self._count(record, rank.process.node, committed, domain)
        return record

    def note(self, rank: Rank, in_view: bool, now_s: float) -> None:
        """``rank`` is gone since now, and nobody wanted that: for :meth:`of_nodes`."""
        self._recent = [each for each in self._recent if each[0] >= now_s - WINDOW_S]
        self._recent.append((now_s, rank.process.node, rank.member, in_view))

    def of_nodes(self, nodes: Iterable[str], since_s: float) -> list[tuple[Member, bool]]:
        """Who was lost on these nodes since then, up to :data:`WINDOW_S` ago, and whether it was in the view."""
        inside = set(nodes)
        return sorted((member, joined) for at_s, node, member, joined in self._recent if node in inside and at_s >= since_s)

    def _count(self, record: ProcessLost, node: str, committed: int, domain: str = "") -> None:
        if isinstance(record.cause, TrainRaised):
            self._raised_at.add(record.step)
        detail = record.detail or str(record.cause)
        where = record.member.slot, node, record.at_s, record.step, record.shard
        self.all.append(Loss(*where, record.fault is not None, detail, committed, domain))

    def raised_before(self, step: int) -> bool:
        """Whether the train function raised at this step before, in whichever rank."""
        return step in self._raised_at

    def injected(self, members: Iterable[Member]) -> bool:
        """Whether chaos has struck one of these."""
        return any(member in self._injected for member in members)

    def healed(self, members: Iterable[Member]) -> None:
        """What chaos has done to these is undone: all of their state was replaced."""
        for member in members:
            self._injected.pop(member, None)

    def aimed(self, event: FaultRecord, present: tuple[Member, ...]) -> None:
        """A fault is aimed at ranks, of which ``present`` are alive: deaths that follow are injected, until it has healed."""
        if event.phase in ("aimed", "executed"):
            self._injected.update(dict.fromkeys(present, event.fault.id))
        else:
            self.healed(member for member in event.members if self._injected.get(member) == event.fault.id)

    def replay_loss(self, record: ProcessLost, rank: Rank, committed: int) -> None:
        self._injected.pop(record.member, None)
        self._count(record, rank.process.node, committed)
