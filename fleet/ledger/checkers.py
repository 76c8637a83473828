"""Whether a run has survived its chaos: folds of its journal, one for each property that should hold. Pure.

Three verdicts: ok, violated, unknown. Unknown means that the journal does not decide it. A checker that crashes gives unknown and the
error, never ok. Bounds in time follow from the run's own time-outs, so that no bound is shorter than the run's own wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fleet.ledger.forecast import numbers, timeouts_said
from fleet.ledger.samples import StepCover
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.fault_kinds import BY_HAND, Check, Cost, kind_of
from fleet.protocol.records import (
    COMMIT,
    COMPLETED,
    UNSAVED,
    Committed,
    FaultRecord,
    HistoryBegun,
    ProcessLost,
    Record,
    Resumed,
    RunEnded,
    RunStarted,
    Spans,
    ViewPublished,
    configuration,
    section,
)
from fleet.protocol.types import Member

OK, VIOLATED, UNKNOWN = "ok", "violated", "unknown"
MOST_OTHER = 0.01
"""The largest share of the rank-seconds in the ledger's ``other``."""
LAST_S = 1.0
"""Seconds of a process's time that may die with it unreported: since its agent's last look, or since its agent's last report."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """``verdict``: ok, violated or unknown. ``reason`` is a sentence with the figures."""

    check: str
    verdict: str
    reason: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds. ``react_s``: from a loss to a view without it. ``full_s``: from the last loss to a full world. ``hang_s``: the longest time
    without progress before a rank is evicted."""

    react_s: float
    full_s: float
    hang_s: float

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Bounds:
        """From the settings that a run recorded; their values may be any text."""
        limits = timeouts_said(settings)
        react_s = sum(limits[name] for name in ("node_s", "quiesce_s", "form_s", "start_s")) + numbers(settings).get("form_delay_s", 0.0)
        return cls(react_s, react_s + limits["start_s"], limits["progress_s"])


class Checker(ABC):
    """One property that should hold. ``takes``: the types of records that it reads."""

    name: ClassVar[str]
    takes: ClassVar[tuple[type, ...]]

    @abstractmethod
    def __init__(self, bounds: Bounds) -> None: ...

    @abstractmethod
    def take(self, record: Any) -> None:
        """One record of the journal, in order."""

    @abstractmethod
    def verdict(self, now_s: float) -> tuple[str, str]:
        """(verdict, sentence) at ``now_s``, the last time in the journal."""


class FaultsAccounted(Checker):
    """Every fault that came due was executed or suppressed, once."""

    name = "faults_accounted"
    takes = (FaultRecord, Resumed, RunEnded)

    def __init__(self, bounds: Bounds) -> None:
        self._bound_s = bounds.react_s
        self._origin_s: float | None = None
        self._due_s: dict[str, float] = {}
        self._decided: dict[str, set[tuple[str, float]]] = {}
        self._left = 0
        self._ended = False

    def take(self, record: FaultRecord | Resumed | RunEnded) -> None:
        match record:
            case FaultRecord(phase="planned", fault=fault, at_s=at_s):
                if self._origin_s is None:  # a fault ordered by hand is due at once; else the plan's time begins now
                    self._origin_s = at_s - (fault.at_s if fault.component == BY_HAND else 0.0)
                self._due_s[fault.id] = self._origin_s + fault.at_s
            case FaultRecord(phase="executed" | "suppressed" as phase, fault=fault, at_s=at_s):
                self._decided.setdefault(fault.id, set()).add((phase, at_s))  # a decision reported twice counts once
            case Resumed(gap=True):  # the process that decides the rest is gone
                self._left += len(self._open())
                self._due_s = {fault: due_s for fault, due_s in self._due_s.items() if fault in self._decided}
            case RunEnded():
                self._ended = True

    def _open(self) -> list[str]:
        return sorted(fault for fault in self._due_s if fault not in self._decided)

    def verdict(self, now_s: float) -> tuple[str, str]:
        doubled = sorted(fault for fault, decisions in self._decided.items() if len(decisions) > 1)
        missing = [fault for fault in self._open() if now_s - self._due_s[fault] > self._bound_s]
        if doubled:
            return VIOLATED, f"decided more than once: {', '.join(doubled)}"
        if missing:
            return VIOLATED, f"neither executed nor suppressed {self._bound_s:g} s after they were due: {', '.join(missing)}"
        left = self._left + len(self._open())
        if left and not self._ended:
            return UNKNOWN, f"the journal ends before {left} of {len(self._due_s)} planned faults were decided"
        still = f"; {left} more were still to come when the run ended" if left else ""
        return OK, f"{len(self._decided)} faults, each executed or suppressed once{still}"


class RanksLeft(Checker):
    """After a fault ended a rank of the view, a view without that rank or the run's end followed within the bound."""

    name = Check.RANKS_LEFT.value
    takes = (FaultRecord, ProcessLost, ViewPublished, Resumed, RunEnded)

    def __init__(self, bounds: Bounds) -> None:
        self._bound_s = bounds.react_s
        self._view: frozenset[Member] = frozenset()
        self._kinds: dict[str, str] = {}
        self._waiting: dict[str, tuple[float, frozenset[Member]]] = {}
        self._seen: set[str] = set()
        self._late: list[str] = []

    def take(self, record: FaultRecord | ProcessLost | ViewPublished | Resumed | RunEnded) -> None:
        match record:
            case FaultRecord(fault=fault, phase=phase):
                self._kinds[fault.id] = fault.kind
                if phase == "executed":
                    self._note_fault(fault.id, record.members, record.at_s)
            case ProcessLost(fault=str(fault), member=member, at_s=at_s):  # this record may come before the fault's
                self._note_fault(fault, (member,), at_s)
            case ViewPublished(view=view, at_s=at_s):
                self._view = frozenset(view.members)
                self._answer(at_s, [fault for fault, (_, hit) in self._waiting.items() if not hit & self._view])
            case Resumed(gap=True, at_s=at_s):
                self._view = frozenset()
                self._waiting.clear()
            case RunEnded(at_s=at_s):
                self._answer(at_s, list(self._waiting))

    def _note_fault(self, fault: str, members: Iterable[Member], at_s: float) -> None:
        hit = self._view.intersection(members)
        if hit and kind_of(self._kinds.get(fault, "")).survived is Check.RANKS_LEFT:
            since_s, others = self._waiting.get(fault, (at_s, frozenset()))
            self._waiting[fault] = since_s, others | hit
            self._seen.add(fault)

    def _answer(self, at_s: float, faults: list[str]) -> None:
        self._late += [fault for fault in faults if at_s - self._waiting.pop(fault)[0] > self._bound_s]

    def verdict(self, now_s: float) -> tuple[str, str]:
        late = [*self._late, *(fault for fault, (since_s, _) in self._waiting.items() if now_s - since_s > self._bound_s)]
        if late:
            return VIOLATED, f"no new view within {self._bound_s:g} s after {', '.join(sorted(late))}"
        if self._waiting:
            return UNKNOWN, f"the journal ends less than {self._bound_s:g} s after {', '.join(sorted(self._waiting))}"
        if not self._seen:
            return UNKNOWN, "no fault has ended a rank of the view"
        return OK, f"each of {len(self._seen)} faults that ended ranks of the view was answered by a view without them"


class WorldFullAgain(Checker):
    """The view had all its ranks within the bound, and kept them. The bound begins with the last fault, loss, or return of a node."""

    name = "world_full_again"
    takes = (RunStarted, FaultRecord, ProcessLost, ViewPublished, Resumed, RunEnded)

    def __init__(self, bounds: Bounds) -> None:
        self._bound_s = bounds.full_s
        self._world: int | None = None
        self._last_s: float | None = None
        self._full_s: float | None = None
        self._view: frozenset[Member] = frozenset()
        self._dead: set[Member] = set()
        self._away: set[str] = set()
        self._ended = self._injected = False

    def take(self, record: RunStarted | FaultRecord | ProcessLost | ViewPublished | Resumed | RunEnded) -> None:
        match record:
            case RunStarted(world=world):
                self._world = world
            case RunEnded():
                self._ended = True
            case FaultRecord(phase="executed" | "healed"):
                self._fault(record)
            case ProcessLost(member=member, at_s=at_s) if not self._ended:
                self._dead.add(member)
                self._last_s = at_s
            case ViewPublished(view=view):
                self._view = frozenset(view.members[rank] for rank in view.computing)
            case Resumed(gap=True, at_s=at_s):
                self._view, self._last_s, self._ended = frozenset(), at_s, False
                self._away.clear()
        if not self._ended and not isinstance(record, RunStarted):
            full = len(self._view) == self._world and not self._view & self._dead
            self._full_s = (record.at_s if self._full_s is None else self._full_s) if full else None

    def _fault(self, record: FaultRecord) -> None:
        costs, executed = kind_of(record.fault.kind).may_cost, record.phase == "executed"
        self._last_s, self._injected = record.at_s, True
        if executed and Cost.DEATH in costs:
            self._dead.update(record.members)
        if Cost.NODE in costs:
            (self._away.add if executed else self._away.discard)(record.fault.id)

    def verdict(self, now_s: float) -> tuple[str, str]:
        if self._world is None:
            return UNKNOWN, "the journal has no start of the run"
        if self._last_s is None or not self._injected:
            return UNKNOWN, "no fault was executed"
        if self._full_s is not None:
            took_s = max(0.0, self._full_s - self._last_s)
            verdict = OK if took_s <= self._bound_s else VIOLATED
            return verdict, f"{self._world} ranks again {took_s:.2f} s after the last fault or loss (bound {self._bound_s:g} s)"
        if self._away:
            return UNKNOWN, f"the node that {', '.join(sorted(self._away))} took was not back when the run ended"
        since_s = now_s - self._last_s
        if since_s <= self._bound_s:
            return UNKNOWN, f"the run ended {since_s:.2f} s after the last fault or loss, before the bound of {self._bound_s:g} s"
        return VIOLATED, f"{len(self._view - self._dead)} of {self._world} ranks {since_s:.2f} s after the last fault or loss"


class GoesOn(Checker):
    """After every fault that stops or slows the run for a while, the run committed a step, or completed."""

    name = Check.GOES_ON.value
    takes = (FaultRecord, Committed, Resumed, RunEnded)

    def __init__(self, bounds: Bounds) -> None:
        self._bound_s = bounds.hang_s + bounds.react_s
        self._waiting: dict[str, tuple[float, float]] = {}
        self._seen = 0
        self._late: list[str] = []

    def take(self, record: FaultRecord | Committed | Resumed | RunEnded) -> None:
        match record:
            case FaultRecord(phase="executed", fault=fault, at_s=at_s) if kind_of(fault.kind).survived is Check.GOES_ON:
                self._waiting[fault.id] = at_s, self._bound_s + fault.duration_s
                self._seen += 1
            case Committed(at_s=at_s):
                self._went_on(at_s)
            case RunEnded(status=status, at_s=at_s) if status in (COMPLETED, UNSAVED):
                self._went_on(at_s)
            case RunEnded(status="failed"):
                self._late += list(self._waiting)
            case Resumed(gap=True):
                self._waiting.clear()

    def _went_on(self, at_s: float) -> None:
        self._late += self._overdue(at_s)
        self._waiting = {fault: since for fault, since in self._waiting.items() if since[0] >= at_s}

    def _overdue(self, now_s: float) -> list[str]:
        return [fault for fault, (since_s, bound_s) in self._waiting.items() if now_s - since_s > bound_s]

    def verdict(self, now_s: float) -> tuple[str, str]:
        late = sorted({*self._late, *self._overdue(now_s)})
        if late:
            return VIOLATED, f"no step was committed in time after {', '.join(late)}"
        if self._waiting:
            return UNKNOWN, f"the journal ends soon after {', '.join(sorted(self._waiting))}"
        if not self._seen:
            return UNKNOWN, "no fault has stopped or slowed the run"
        return OK, f"a step was committed after each of {self._seen} faults that stop or slow the run"


class Bits(Checker):
    """No rank has bits at the end that a fault made wrong. A rank has found them, or a twin without faults shows that none are left."""

    name = Check.BITS.value
    takes = (FaultRecord, ProcessLost, HistoryBegun, ViewPublished)

    def __init__(self, bounds: Bounds) -> None:
        self._wrong: dict[Member, str] = {}
        self._seen: set[str] = set()
        self._unseen: set[str] = set()

    def take(self, record: FaultRecord | ProcessLost | HistoryBegun | ViewPublished) -> None:
        match record:
            case FaultRecord(phase="executed", fault=fault, members=members) if kind_of(fault.kind).survived is Check.BITS:
                self._seen.add(fault.id)
                if Cost.WRONG in kind_of(fault.kind).may_cost:
                    self._wrong |= dict.fromkeys(members, fault.id)
                else:
                    self._unseen.add(fault.id)
            case ProcessLost(member=member):
                self._wrong.pop(member, None)
            case HistoryBegun():  # all ranks go back to a state that is known to be good
                self._wrong.clear()
            case ViewPublished(view=view):
                for rank in view.receivers:  # they receive the state
                    self._wrong.pop(view.members[rank], None)

    def verdict(self, now_s: float) -> tuple[str, str]:
        if not self._seen:
            return UNKNOWN, "no bit was flipped, and no twin has run to compare with"
        left = sorted({*self._wrong.values(), *self._unseen})
        if left:
            return UNKNOWN, f"no rank has found the wrong bits of {', '.join(left)}: a twin can show whether they are left (--twin)"
        return OK, f"the wrong bits of {len(self._seen)} faults were replaced, or computed again"


class CommitsExact(Checker):
    """No committed step is lost or doubled, but for the steps that a new history rolled back on record.

    In the coordinator's records, commits only go up within a history. No view starts from before them, and a history starts from an
    existing state. In the ranks' time lines, a process commits a step of a history at most once. Together they commit every step.
    """

    name = "commits_exact"
    takes = (Spans, Committed, HistoryBegun, ViewPublished)

    def __init__(self, bounds: Bounds) -> None:
        self._wrong = ""
        self._newest: dict[int, int] = {}
        self._base: dict[int, int] = {}
        self._done = StepCover()
        self._next_of: dict[tuple[Member, int], int] = {}

    def take(self, record: Spans | Committed | HistoryBegun | ViewPublished) -> None:
        match record:
            case Spans():
                self._spans(record)
            case HistoryBegun(history=history, from_state=start):
                self._base[history] = self._newest[history] = start.step
            case Committed(state=state):
                if state.step <= self._newest.get(state.history, -1) and state.step != self._base.get(state.history):
                    self._say(f"step {state.step} of history {state.history} was committed twice")
                self._newest[state.history] = state.step
            case ViewPublished(view=view, graceful=False):  # a view that grows beside running steps has an older state than it will have
                newest = self._newest.get(view.state.history, view.state.step)
                if view.state.step < newest:
                    lost = f"{newest} steps of history {view.state.history} were committed"
                    self._say(f"generation {view.generation} starts from step {view.state.step}, but {lost}")

    def _say(self, wrong: str) -> None:
        self._wrong = self._wrong or wrong

    def _spans(self, record: Spans) -> None:
        commits, key = record.codes.count(COMMIT), (record.member, record.history)
        if commits and record.step < self._next_of.get(key, record.step):
            self._say(f"{record.member} committed step {record.step} of history {record.history} twice")
        self._next_of[key] = record.step + commits
        self._done.add(record)

    def verdict(self, now_s: float) -> tuple[str, str]:
        if self._wrong:
            return VIOLATED, self._wrong
        if not self._newest:
            return UNKNOWN, "no step was committed"
        if not self._done:
            return UNKNOWN, "the journal has no time lines of ranks"
        last = max(self._newest)
        first, end = self._base.get(last, 0), self._newest[last]
        upto = self._done.first_gap(last, first)
        if upto < end:
            return VIOLATED, f"no rank committed step {upto} of history {last}"
        return OK, f"{end - first} steps of history {last}, each committed, none twice by one process"


class LedgerCloses(Checker):
    """Every rank-second is in the ledger, and next to none in its ``other``, but for time that dies with processes and nodes."""

    name = "ledger_closes"
    takes = (ProcessLost,)

    def __init__(self, bounds: Bounds) -> None:
        self._lost = 0
        self.ledger: LedgerSummary | None = None

    def take(self, record: ProcessLost) -> None:
        self._lost += 1

    def verdict(self, now_s: float) -> tuple[str, str]:
        if self.ledger is None:
            return UNKNOWN, "no ledger was given"
        if not self.ledger.closes:
            return VIOLATED, "the ledger does not close"
        most = MOST_OTHER + self._lost * LAST_S / max(self.ledger.rank_s, LAST_S)
        verdict = OK if 0 <= self.ledger.other_ratio <= most else VIOLATED
        return verdict, f"other is {self.ledger.other_ratio:.3%} of the rank-seconds (at most {most:.3%}, with {self._lost} lost processes)"


CHECKERS: tuple[type[Checker], ...] = (FaultsAccounted, RanksLeft, WorldFullAgain, GoesOn, Bits, CommitsExact, LedgerCloses)


class Judge:
    """Folds a run's journal, record by record, through all checkers."""

    def __init__(self, checkers: tuple[type[Checker], ...] = CHECKERS, bounds: Bounds | None = None) -> None:
        self._fixed = bounds is not None
        self._kinds = checkers
        self._chaos = False
        self._now_s = 0.0
        self._set_up(bounds or Bounds.of({}))

    def _set_up(self, bounds: Bounds) -> None:
        self._checkers = [kind(bounds) for kind in self._kinds]
        self._broken: dict[str, str] = {}
        self._by_record: dict[type, list[Checker]] = {}
        for checker in self._checkers:
            for kind in checker.takes:
                self._by_record.setdefault(kind, []).append(checker)

    def take(self, record: Record) -> None:
        """One record of the journal, in order."""
        if isinstance(record, RunStarted) and not self._fixed:
            self._set_up(Bounds.of(section(configuration(record.config), "settings")))
        elif isinstance(record, FaultRecord):
            self._chaos = True
        self._now_s = max(self._now_s, getattr(record, "at_s", 0.0))
        for checker in self._by_record.get(type(record), ()):
            try:
                checker.take(record)
            except Exception as error:  # noqa: BLE001 - an error of a checker must not end the fold, and is no verdict
                self._broken[checker.name] = _crash(error)

    def judgements(self, ledger: LedgerSummary | None = None) -> list[Judgement]:
        """One for each checker, in order; none for a run without chaos."""
        return [self._judged(checker, ledger) for checker in self._checkers] if self._chaos else []

    def _judged(self, checker: Checker, ledger: LedgerSummary | None) -> Judgement:
        if checker.name in self._broken:
            return Judgement(checker.name, UNKNOWN, self._broken[checker.name])
        if isinstance(checker, LedgerCloses):
            checker.ledger = ledger
        try:
            return Judgement(checker.name, *checker.verdict(self._now_s))
        except Exception as error:  # noqa: BLE001 - as above
            return Judgement(checker.name, UNKNOWN, _crash(error))


def judged(records: Iterable[Record], ledger: LedgerSummary | None = None) -> tuple[Judgement, ...]:
    """The judgements on a run's journal; ``ledger`` is that of the same run."""
    judge = Judge()
    for record in records:
        judge.take(record)
    return tuple(judge.judgements(ledger))


def _crash(error: Exception) -> str:
    return f"the checker crashed: {type(error).__name__}: {error}"


def with_twin(checks: Iterable[Mapping[str, str]], equal: bool | None) -> list[dict[str, str]]:
    """Checks as plain data, with the answer of a twin without faults about the bits. None: the twin did not end, and the checks stay."""
    if equal is None:
        return [dict(one) for one in checks]
    reason = "the twin without faults ended with the same bits" if equal else "the twin without faults ended with other bits"
    answer = {"check": Bits.name, "verdict": OK if equal else VIOLATED, "reason": reason}
    return [answer if one["check"] == Bits.name else dict(one) for one in checks]


def violated(checks: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The checks that do not hold, of checks as plain data."""
    return [one for one in checks if one["verdict"] == VIOLATED]
