"""A plain job, whose script runs without Fleet. Input: its ranks' messages, and the ends of processes. Output: records of the journal.
Pure.

A *launch* is one start of all ranks by the job's own launcher. Its number is the incarnation of each rank. The ranks are a view as soon as
all of them train. A step counts as committed when every rank has ended it. A new launch rolls back the steps after the one from which it
begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fleet.machine.plain.files import SavedFiles
from fleet.machine.plain.rank import NO_VIEW, RankTime
from fleet.machine.plain.words import What, Word
from fleet.protocol.causes import Cause, EndWhy, Evicted, ProcessEnded, StartsAgain, TrainRaised
from fleet.protocol.fault_kinds import Cost, kind_of
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    FaultRecord,
    HistoryBegun,
    ProcessLost,
    ProcessUp,
    Record,
    RunEnded,
    ViewPublished,
    status_of,
)
from fleet.protocol.types import Fault, Member, Process, StateId, View

KILLED = -9


@dataclass(frozen=True, slots=True)
class Limits:
    """The script's failures, without chaos, after which the run ends: ``fruitless`` launches in a row without a step, or ``losses``
    launches within ``window_s``."""

    fruitless: int
    losses: int
    window_s: float


@dataclass(slots=True)
class _Launch:
    """One start of all ranks. ``fault``: the injected fault that has ended it. ``error``: the error of the first lost rank."""

    number: int = NO_VIEW
    formed: bool = False
    stepped: bool = False
    lost: bool = False
    fault: str | None = None
    error: str = ""
    unsure: dict[int, CheckpointRecord] = field(default_factory=dict)
    """By rank, its last checkpoint. The rank may still rename the file: the next message shows that it has its last name."""


class PlainJob:
    """The state of the job. Each method takes one event and returns the records that follow from it, in the order of the journal.

    Attributes:
        verdict: the reason to end the job, and the last error of its script; None while the job may go on.
        committed: the newest step that every rank has ended.
    """

    def __init__(self, world: int, limits: Limits) -> None:
        self._world, self._limits = world, limits
        self._files = SavedFiles()
        self._ranks: dict[int, RankTime] = {}
        self._launch = _Launch()
        self._generation, self._history, self._base = NO_VIEW, 0, 0
        self._causes: list[str] = []
        self._injected: dict[Member, Fault] = {}
        self._fruitless = 0
        self._failures_s: deque[float] = deque()
        self._leaving = False
        self.committed = 0
        self.verdict: tuple[str, str] | None = None

    @property
    def newest_file(self) -> str:
        """The checkpoint that was saved last; empty without one."""
        return self._files.newest

    @property
    def ranks(self) -> Mapping[int, RankTime]:
        """By rank, the live processes."""
        return self._ranks

    @property
    def has_trained(self) -> bool:
        """Whether all ranks have trained together at least once."""
        return self._generation != NO_VIEW

    @property
    def launch(self) -> int:
        """How often the launcher had started all ranks before; -1 before the first rank."""
        return self._launch.number

    @property
    def formed(self) -> bool:
        """Whether the ranks of this launch train."""
        return self._launch.formed

    # ---- processes

    def up(self, member: Member, process: Process, at_us: int) -> list[Record]:
        """The process of a rank is there."""
        if member.incarnation > self._launch.number:
            self._launch = _Launch(member.incarnation)
        self._ranks[member.slot] = RankTime(member, process, at_us)
        return [ProcessUp(member, process, "", at_us / 1e6)]

    def ended(self, member: Member, at_s: float) -> list[Record]:
        """The process of a rank is gone."""
        rank = self._ranks.pop(member.slot)
        rank.end(round(at_s * 1e6))
        spans = rank.take(self._place, self._history, self._base, last=True)
        if rank.done or self._leaving:
            return [*self._surely(rank), *spans]
        lost = self._lost(rank, at_s)
        if not self._ranks:
            self._judge(at_s)
        return [*spans, lost]

    @property
    def _place(self) -> int:
        return self._generation if self._launch.formed else NO_VIEW

    def _lost(self, rank: RankTime, at_s: float) -> ProcessLost:
        """The record of a loss. The first loss of a launch has its own cause. The other ranks end because of it, and have its fault."""
        launch, cause = self._launch, self._cause(rank)
        killed = isinstance(cause, ProcessEnded) and cause.status == KILLED
        if not launch.lost or killed:
            self._causes.append(str(rank.member))
            launch.fault = self._injected[rank.member].id if rank.member in self._injected else launch.fault
            launch.error = launch.error or rank.error
        else:
            cause = Evicted(StartsAgain("another rank was lost, and the launcher starts all again"))
        launch.lost = True
        step = self._base + rank.steps if launch.formed else -1
        return ProcessLost(rank.member, cause, launch.fault, self._place, step, at_s=at_s)

    def _cause(self, rank: RankTime) -> Cause:
        fault = self._injected.get(rank.member)
        if fault is not None and Cost.DEATH in kind_of(fault.kind).may_cost:
            return ProcessEnded(KILLED)
        return TrainRaised(rank.error) if rank.error else ProcessEnded()

    def _judge(self, at_s: float) -> None:
        """A launch is over. A launch that an injected fault has ended does not count against the script."""
        if self._launch.fault is not None:
            return
        self._fruitless = 0 if self._launch.stepped else self._fruitless + 1
        self._failures_s.append(at_s)
        while at_s - self._failures_s[0] > self._limits.window_s:
            self._failures_s.popleft()
        said = self._launch.error or "its process ended without an exception"
        if self._fruitless >= self._limits.fruitless:
            self.verdict = f"the script failed {self._fruitless} times by itself, without an optimizer step in between", said
        elif len(self._failures_s) >= self._limits.losses:
            self.verdict = f"the script failed {len(self._failures_s)} times by itself within {self._limits.window_s:g} s", said

    # ---- words

    def receive(self, member: Member, word: Word) -> list[Record]:
        """Take one message of a rank, in the order in which the rank sent it."""
        rank, records = self._ranks[member.slot], list[Record]()
        if word.what not in (What.MOVED, What.COPIED):
            records += self._surely(rank)
        rank.receive(word)
        match word.what:
            case What.READY:
                records += [*rank.begun(self._history), *self._form(word)]
            case What.STEP:
                records += [*self._form(word), *self._stepped(rank, word)]
            case What.SAVED if word.path:
                self._saved(rank, word)
            case What.LOADED:
                rank.loads(self._files.step_of(word.path))
            case What.MOVED:
                self._moved(rank, word)
            case What.COPIED:
                self._files.copied(word.path, word.to)
        return records

    def _form(self, word: Word) -> list[Record]:
        """Make a view of the ranks once all train. A step of one rank also counts, since other ranks may compute without modules."""
        ready = all(rank.trains for rank in self._ranks.values()) or word.what == What.STEP
        if self._launch.formed or len(self._ranks) < self._world or not ready:
            return []
        self._launch.formed = True
        at_s, before = word.at_us / 1e6, self._back(word.at_us / 1e6) if self.has_trained else []
        self._generation += 1
        members = tuple(self._ranks[number].member for number in sorted(self._ranks))
        ranges = tuple((number, number + 1) for number in range(self._world))
        view = View(self._generation, members, ranges, 0, (), StateId(self._history, self._base), "")
        reason = f"the launcher has started all ranks again: they go on from step {self._base}" if before else "all ranks train"
        causes, self._causes = tuple(self._causes), []
        return [*before, ViewPublished(view, at_s, reason, False, causes)]

    def _back(self, at_s: float) -> list[Record]:
        """Roll back to the step of the loaded file; without a known file, to the beginning."""
        loaded = [rank.loaded for rank in self._ranks.values() if rank.loaded is not None]
        base, old = min(loaded, default=0), self._history
        ahead = [Committed(StateId(old, base), at_s)] if base > self.committed else []  # a rank saved it before all had ended the step
        self._history, self._base, self.committed = old + 1, base, base
        why = "the step of the checkpoint that the script has loaded" if loaded else "the script has loaded no checkpoint of this run"
        return [*ahead, HistoryBegun(old + 1, StateId(old, base), at_s, why)]

    def _stepped(self, rank: RankTime, word: Word) -> list[Record]:
        self._launch.stepped = True
        if not self._launch.formed:
            return []
        at_s, records = word.at_us / 1e6, list[Record]()
        newest = self._base + min(each.steps for each in self._ranks.values()) if len(self._ranks) == self._world else 0
        while self.committed < newest:
            self.committed += 1
            records.append(Committed(StateId(self._history, self.committed), at_s))
        return records + (list(rank.take(self._generation, self._history, self._base)) if rank.due(word.at_us) else [])

    def _saved(self, rank: RankTime, word: Word) -> None:
        step = word.steps + (self._base if self._launch.formed else rank.loaded or 0)
        self._files.saved(word.path, step)
        took_s = rank.saved_s
        state, blocked_s = StateId(self._history, step), took_s if word.blocking else 0.0
        if self._launch.formed:
            self._launch.unsure[rank.member.slot] = CheckpointRecord(
                word.path, "durable", state, word.at_us / 1e6, word.bytes, blocked_s, took_s
            )  # fmt: skip

    def _moved(self, rank: RankTime, word: Word) -> None:
        self._files.moved(word.path, word.to)
        unsure = self._launch.unsure.get(rank.member.slot)
        if unsure is not None and unsure.checkpoint == word.path:
            self._launch.unsure[rank.member.slot] = replace(unsure, checkpoint=word.to)

    def _surely(self, rank: RankTime) -> list[Record]:
        """The record of the rank's last checkpoint, whose file has its last name now."""
        record = self._launch.unsure.pop(rank.member.slot, None)
        return [record] if record is not None else []

    # ---- chaos, and the end

    def injected(self, event: FaultRecord) -> list[Record]:
        """Take in a fault's new phase. ``aimed`` comes right before the fault: a death right after it counts as injected."""
        if event.phase in ("aimed", "executed"):
            self._injected.update((rank.member, event.fault) for rank in self._ranks.values() if rank.member in event.members)
        elif event.phase in ("suppressed", "healed"):
            for member in event.members:
                if (fault := self._injected.get(member)) is not None and fault.id == event.fault.id:
                    del self._injected[member]
        return [event] if event.phase != "aimed" else []

    def leave(self) -> None:
        """From now on all processes are ended in order, and none counts as lost."""
        self._leaving = True

    def over(self, why: EndWhy, reason: str, at_s: float, detail: str = "") -> list[Record]:
        """The last records of the run."""
        records = list[Record]()
        for rank in self._ranks.values():
            rank.end(round(at_s * 1e6))
            records += [*self._surely(rank), *rank.take(self._place, self._history, self._base, last=True)]
        self._ranks = {}
        return [*records, RunEnded(status_of(why), reason, at_s, "", detail, why)]
