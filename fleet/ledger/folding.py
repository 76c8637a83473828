"""Shortens old parts of a journal: many committed steps of a rank become one record, as far as all reports stay the same.

It folds the time of steps that meet three conditions. They lie behind the run's last durable checkpoint, no rollback undid them, and they
are not among the newest, which give the step times. Steps become one record where they have one rank, view and history. They must also lie
in one bucket of the run's timeline, without a durable checkpoint between them. Sums, costs, rollbacks, stories, verdicts and the timeline
stay the same.

Between two other happenings the first and the last commit note stay, and the last usage of each rank. A figure's curve keeps as many points
as a page shows. All else stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fleet.ledger.costs import STEADY_STEPS
from fleet.ledger.fold import to_us
from fleet.ledger.slots import CHARGED, COMMIT_INDEX, INDEX, STEP_KINDS
from fleet.ledger.timeline import Timeline
from fleet.protocol.levels import STORE
from fleet.protocol.records import (
    COMMIT,
    CheckpointRecord,
    Committed,
    DecisionMade,
    HistoryBegun,
    Measurement,
    OnceRecord,
    Received,
    Record,
    RunStarted,
    Spans,
    Usage,
    ViewPublished,
    configuration,
    section,
)
from fleet.protocol.types import Member, StateId

KEPT_STEPS = 5_000
"""So many of the newest steps stay: more than the ledger keeps step times of."""
KEPT_POINTS = 500
"""Points of a figure's curve in the old part."""
FIRST_STEPS = 2
"""The first steps of a rank in a view show when it goes on again: they stay."""
FIRST_COMMITS = 2 * STEADY_STEPS
"""So many commit notes after another happening stay: they show when the run is as fast as before it."""
PASSING = (Spans, Committed, Measurement, DecisionMade, CheckpointRecord, Received, OnceRecord, Usage)
"""Records across which a rank's spans may be joined. Before any other record, the joined spans are written."""
NEVER = 1 << 62


@dataclass(slots=True)
class Survey:
    """Facts of a whole journal that the fold needs, from a first reading.

    Attributes:
        horizon: the commit from which on all records stay; None: the fold changes nothing.
        width_us: width of a bucket of the run's timeline at the horizon, from ``start_us`` on.
        cuts: steps at which a rollback may end. No record joins steps on both sides of a cut.
        by_view, by_history: generation and history -> the step up to which no rollback undid its steps.
        points: number of points of each figure before the horizon.
        paced: the run's pace, which needs every commit, may stop faults: all commit notes stay.
    """

    horizon: StateId | None = None
    start_us: int = 0
    width_us: int = 1
    cuts: list[int] = field(default_factory=list)
    by_view: dict[int, int] = field(default_factory=dict)
    by_history: dict[int, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    paced: bool = False


class _Reading:
    """Facts that a survey gathers on its way."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self.newest = StateId(0, 0)
        self.samples: list[tuple[StateId, int, dict[str, int]]] = []
        self.durable: list[int] = []
        self.views: list[tuple[int, int]] = []
        self.histories: list[tuple[int, int]] = [(0, 0)]
        self.points: Counter[str] = Counter()

    def take(self, record: Record) -> None:
        match record:
            case Committed(state=state, at_s=at_s):
                self.newest = state
                last = self.samples[-1][0] if self.samples else StateId(-1, 0)
                if state.history != last.history or state.step >= last.step + self.every:
                    self.samples.append((state, to_us(at_s), dict(self.points)))
            case ViewPublished(view=view, graceful=False):
                self.views.append((view.generation, view.state.step))
            case HistoryBegun(history=history, from_state=start):
                self.histories.append((history, start.step))
            case CheckpointRecord(phase="durable", level=level, state=state) if level == STORE:
                self.durable.append(state.step)
            case Measurement(name=name):
                self.points[name] += 1


def survey(records: Iterable[Record], kept_steps: int = KEPT_STEPS) -> Survey:
    """The first reading; it needs no ``Spans``. ``kept_steps``: with fewer than the ledger's step times, those would change."""
    reading, started = _Reading(kept_steps // 64), None
    for record in records:
        started = record if isinstance(record, RunStarted) else started
        reading.take(record)
    if started is None:
        return Survey()
    last = min(reading.durable[-1] if reading.durable else -1, reading.newest.step - kept_steps)
    old = [sample for sample in reading.samples if sample[0].history == reading.newest.history and sample[0].step <= last]
    if not old:
        return Survey()
    horizon, at_us, points = old[-1]
    start_us, timeline = to_us(started.at_s), Timeline()
    timeline.start(started.world + started.spares, start_us)
    timeline.paint(0, start_us, at_us - start_us, 0)
    cuts = sorted({*reading.durable, *(step for _, step in reading.views), *(step for _, step in reading.histories)})
    paced = bool(section(configuration(started.config), "chaos").get("floor"))
    return Survey(horizon, start_us, timeline.width_us, cuts, _limits(reading.views), _limits(reading.histories), points, paced)


def _limits(begun: list[tuple[int, int]]) -> dict[int, int]:
    """Number of a view or history -> the least step from which a later view or history began."""
    limits: dict[int, int] = {}
    least = NEVER
    for number, step in reversed(begun):
        limits[number] = least
        least = min(least, step)
    return limits


@dataclass(slots=True)
class _Group:
    """Steps ``first`` to ``step`` of one rank, and its time from ``start_us`` to ``end_us`` by letter."""

    start_us: int
    end_us: int
    first: int
    step: int
    sums: dict[str, int] = field(default_factory=dict)

    def take(self, pieces: list[tuple[str, int]], commits: int) -> None:
        for code, duration in pieces:
            self.sums[code] = self.sums.get(code, 0) + duration
            self.end_us += duration
        self.step += commits


class _Track:
    """The time of one process in one view and history, joined."""

    def __init__(self, record: Spans, known: Survey) -> None:
        self._member, self._generation, self._history = record.member, record.generation, record.history
        self._known = known
        self.end_us, self.step = record.start_us, record.step
        self._seen = 0
        self._attempt: list[tuple[str, int]] = []
        self._out: list[Spans] = []
        self._group: _Group | None = None
        generations = known.by_view.get(record.generation, NEVER)
        self._limit = min(generations, known.by_history.get(record.history, NEVER))

    def follows(self, record: Spans) -> bool:
        """Whether the record goes on where this track ends."""
        mine = self._member, self._generation, self._history, self.end_us, self.step
        return mine == (record.member, record.generation, record.history, record.start_us, record.step)

    def add(self, record: Spans) -> None:
        for code, duration in zip(record.codes, record.durations_us, strict=True):
            stepping = any(INDEX[piece] < STEP_KINDS for piece, _ in self._attempt)
            self._attempt.append((code, duration))
            self.end_us += duration
            index = INDEX[code]
            if code == COMMIT:
                self.step += 1
                self._close(1)
            elif index > COMMIT_INDEX or index in CHARGED:
                self._as_it_is()
            elif index >= STEP_KINDS and not stepping:
                self._close(0)

    def _close(self, commits: int) -> None:
        """The pieces at hand are a step, or time between steps. They join the group before them if they may."""
        self._seen += commits
        begin_us = self.end_us - sum(duration for _, duration in self._attempt)
        early_or_undone = commits and (self._seen <= FIRST_STEPS or self.step > self._limit)
        if early_or_undone or self._bucket(begin_us) != self._bucket(self.end_us - 1):
            self._as_it_is(commits)
            return
        pieces, self._attempt = self._attempt, []
        if self._group is not None and not self._joins(self._group):
            self._write(self._group)
            self._group = None
        if self._group is None:
            self._group = _Group(begin_us, begin_us, self.step - commits, self.step - commits)
        self._group.take([piece for piece in pieces if piece[0] != COMMIT], commits)

    def _joins(self, group: _Group) -> bool:
        """Whether the step that ends at ``end_us`` lies in the bucket of ``group``, and no rollback can end between them."""
        same = self._bucket(group.start_us) == self._bucket(self.end_us - 1)
        return same and bisect_left(self._known.cuts, group.first + 1) == bisect_left(self._known.cuts, self.step)

    def _bucket(self, at_us: int) -> int:
        return (at_us - self._known.start_us) // self._known.width_us

    def _as_it_is(self, commits: int = 0) -> None:
        """Keep the pieces at hand unfolded; they hold ``commits`` committed steps."""
        pieces, self._attempt = self._attempt, []
        if self._group is not None:
            self._write(self._group)
            self._group = None
        if pieces:
            self._raw(self.end_us - sum(duration for _, duration in pieces), self.step - commits, pieces)

    def _write(self, group: _Group) -> None:
        pieces = [*group.sums.items(), *[(COMMIT, 0)] * (group.step - group.first)]
        self._raw(group.start_us, group.first, pieces)

    def _raw(self, start_us: int, step: int, pieces: list[tuple[str, int]]) -> None:
        codes, durations = "".join(code for code, _ in pieces), tuple(duration for _, duration in pieces)
        last = self._out[-1] if self._out else None
        joins = last is not None and len(last.codes) + len(codes) < 4_096
        if last is not None and joins:
            codes, durations, step, start_us = last.codes + codes, last.durations_us + durations, last.step, last.start_us
            self._out.pop()
        self._out.append(Spans(self._member, self._generation, self._history, step, start_us, durations, codes))

    def take(self) -> list[Spans]:
        """All spans of the track."""
        self._as_it_is()
        return self._out


def folded(records: Iterable[Record], known: Survey) -> Iterator[Record]:
    """The records of the journal that ``known`` describes, with the old part folded. A folded part may be folded again."""
    kept = _Kept()
    thin, old, fresh = _Thin(known.points), known.horizon is not None, 0
    for record in records:
        old = old and not (isinstance(record, Committed) and record.state == known.horizon)
        if not old:
            yield from kept.take()
            yield record
        elif isinstance(record, Spans):
            kept.add(record, known)
        elif isinstance(record, Usage):
            kept.usage[record.member] = record
        elif isinstance(record, Committed) and not known.paced and fresh > FIRST_COMMITS:
            kept.commits[:] = [*kept.commits[:1], record]
        elif not isinstance(record, Measurement) or thin.keeps(record.name):
            passing = isinstance(record, PASSING)
            fresh = fresh + isinstance(record, Committed) if passing else 0
            yield from kept.noted() if passing else kept.take()
            yield record
    yield from kept.take()


class _Kept:
    """Records that are not written yet: ranks' spans, the first and the last commit note, and the last usage of each rank."""

    def __init__(self) -> None:
        self._tracks: dict[Member, list[_Track]] = {}
        self.commits: list[Committed] = []
        self.usage: dict[Member, Usage] = {}

    def add(self, record: Spans, known: Survey) -> None:
        mine = self._tracks.setdefault(record.member, [])
        if not mine or not mine[-1].follows(record):
            mine.append(_Track(record, known))
        mine[-1].add(record)

    def noted(self) -> list[Record]:
        """The commit notes."""
        found, self.commits = self.commits, []
        return [*found]

    def take(self) -> list[Record]:
        """All records."""
        time = [spans for mine in self._tracks.values() for track in mine for spans in track.take()]
        usage = [*self.usage.values()]
        self._tracks, self.usage = {}, {}
        return [*time, *self.noted(), *usage]


class _Thin:
    """Keeps every n-th point of each figure, and the last one."""

    def __init__(self, points: Mapping[str, int]) -> None:
        self._points, self._seen = points, Counter[str]()

    def keeps(self, name: str) -> bool:
        self._seen[name] += 1
        points = self._points.get(name, 0)
        every = -(-points // KEPT_POINTS) or 1
        return self._seen[name] % every == 0 or self._seen[name] == points
