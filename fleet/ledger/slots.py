"""One slot's account: every microsecond from the start of the run, in order, in one category each. Used by ``fleet.ledger.goodput``.

Times are whole microseconds on the run's clock, so that sums close exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fleet.errors import LedgerError
from fleet.protocol.records import (
    ABANDON,
    CATEGORIES,
    COMM,
    COMMIT,
    COMPUTE,
    DATA,
    GARBAGE,
    GROUP_WAIT,
    HOLD,
    INIT,
    OTHER,
    REFORM,
    RESTORE,
    STANDBY,
    STEP_CODES,
    STRAGGLER,
    Spans,
)
from fleet.protocol.types import Member

CODES = "".join(CATEGORIES)
NAMES = tuple(CATEGORIES.values())
STEP_KINDS = len(STEP_CODES)
if CODES[:STEP_KINDS] != COMPUTE + COMM + STRAGGLER + DATA + GARBAGE:
    raise AssertionError(f"the codes of a step must be the first of CATEGORIES, and the codes are {CODES}")
COMMIT_INDEX, ABANDON_INDEX, HOLD_INDEX = len(CODES), len(CODES) + 1, len(CODES) + 2
INDEX = {code: index for index, code in enumerate(CODES + COMMIT + ABANDON + HOLD)}
REWORK, DETECT, PROVISION, MAINTENANCE = INDEX["R"], INDEX["D"], INDEX["P"], INDEX["M"]
OTHER_INDEX = INDEX[OTHER]
WAITED = frozenset((INDEX[COMM], INDEX[STRAGGLER]))
CHARGED = frozenset((INDEX[RESTORE], INDEX[REFORM], INDEX[INIT], INDEX[GROUP_WAIT]))
"""A rank's spans that are charged to a loss, beside the time that the ledger assigns."""

CLOCK_NOISE_US = 1_000
"""Two processes of a slot may seem to overlap by so much, and no more."""
MAX_COMMITS = 4_096
"""Steps that a slot keeps one by one when no checkpoint is ever durable."""

Piece = tuple[int, int, int]
"""(start_us, duration_us, index) of one span."""


class Commit(NamedTuple):
    """Steps ``first + 1 .. last`` of one slot, which a rollback would take back. ``step_us``: by the first categories, those of a step."""

    first: int
    last: int
    start_us: int
    end_us: int
    step_us: tuple[int, ...]
    rank_steps: int
    productive_us: float


class Abandoned(NamedTuple):
    """A step attempt that does not count. ``rolled_back``: the rank committed it, but its history was already rolled back."""

    slot: int
    generation: int
    pieces: list[Piece]
    rolled_back: bool


class Charge(NamedTuple):
    """Time of one category to charge to a loss: to one that broke ``generation`` when ``after``, else to one that led to it."""

    category: int
    duration_us: int
    member: Member
    generation: int
    after: bool


class Folded(NamedTuple):
    """The effects of one ``Spans`` record beyond its slot's account. Commit times are None without a commit; the first committed step began
    at ``first_step_us``.
    """

    first_step_us: int
    first_commit_us: int | None
    last_commit_us: int | None
    gaps_us: list[int]
    commits: int
    productive_us: float
    abandoned: list[Abandoned]
    charges: list[Charge]


def merge(commits: list[Commit]) -> Commit:
    """One entry for steps that can be rolled back only together."""
    step_us = tuple(map(sum, zip(*(commit.step_us for commit in commits), strict=True)))
    steps, productive_us = sum(commit.rank_steps for commit in commits), sum(commit.productive_us for commit in commits)
    return Commit(commits[0].first, commits[-1].last, commits[0].start_us, commits[-1].end_us, step_us, steps, productive_us)


@dataclass(slots=True, eq=False)
class SlotAccount:
    """The time of one slot. ``us[i]``: microseconds in category ``NAMES[i]``, up to ``cursor_us``, without ``attempt``.

    Attributes:
        stepped: the generation of its last step; -2: it has made no step, not even in generation -1, that of a process without a view.
        away: its process left with a node that was taken away, and no other has come since.
        stopped: its process ended with the cluster, and no other has come since.
    """

    slot: int
    cursor_us: int
    us: list[int] = field(default_factory=lambda: [0] * len(CODES))
    incarnation: int = -1
    generation: int = -1
    history: int = -1
    stepped: int = -2
    lost_us: int | None = None
    away: bool = False
    stopped: bool = False
    attempt: list[Piece] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    last_commit_us: int | None = None
    holes: int = 0
    hole_us: int = 0

    @property
    def member(self) -> Member:
        return Member(self.slot, self.incarnation)

    @property
    def vacant(self) -> int:
        """The category of the slot's time without a process."""
        return MAINTENANCE if self.away else PROVISION

    @property
    def empty(self) -> bool:
        """Whether no process is known to be in the slot."""
        return self.incarnation < 0 or self.lost_us is not None

    @property
    def cold(self) -> bool:
        """Whether the slot waits for its first process since the run started or was resumed, and not for a replacement."""
        return self.incarnation < 0 or self.stopped

    def is_past(self, member: Member) -> bool:
        """Whether another process took the place of ``member``, or its cluster ended."""
        return member.incarnation < self.incarnation or (self.stopped and member.incarnation == self.incarnation)

    def join(self, incarnation: int, lost_us: int | None) -> None:
        """The next process is in the slot; ``lost_us``: the known time of its loss."""
        self.incarnation, self.lost_us, self.stopped, self.away = incarnation, lost_us, False, False

    def stop(self, gone_us: int, back_us: int) -> None:
        """The run was stopped, and the slot had no machine between these times."""
        self.cursor_us = max(self.cursor_us, back_us)
        self.lost_us = gone_us if self.lost_us is None else min(self.lost_us, gone_us)
        self.stopped = self.incarnation >= 0

    def fill(self, end_us: int, index: int) -> int:
        """Put the time from the cursor to ``end_us`` in one category; returns the microseconds."""
        duration = max(0, end_us - self.cursor_us)
        self.us[index] += duration
        self.cursor_us += duration
        return duration

    def abandon(self) -> list[Abandoned]:
        """Close the open attempt without a commit."""
        pieces, self.attempt = self.attempt, []
        self.last_commit_us = None
        return [Abandoned(self.slot, self.generation, pieces, False)] if pieces else []

    def hold(self) -> list[Abandoned]:
        """Abandon the waits of the open attempt; its compute stays."""
        waited = [piece for piece in self.attempt if piece[2] in WAITED]
        self.attempt = [piece for piece in self.attempt if piece[2] not in WAITED]
        return [Abandoned(self.slot, self.generation, waited, False)] if waited else []

    def fold(self, record: Spans, floor: int, members: int) -> Folded:
        """Add a record whose start is at the cursor.

        Args:
            record: contiguous with the record before it.
            floor: steps beyond it were rolled back before this record came.
            members: ranks that compute in the record's view; a step's wall time is their time over this. 0: the rank computes none, as a
                spare of a sharded run, and its steps do not count.

        Raises:
            LedgerError: an unknown code, a negative duration, or a mark of some length.
        """
        abandoned = self.abandon() if record.history != self.history else []  # an attempt may go on in the next view
        self.generation, self.history = record.generation, record.history
        if record.durations_us and min(record.durations_us) < 0:
            raise LedgerError(f"{record.member}: a span of {min(record.durations_us)} us in the record that starts at {record.start_us} us")
        if len(record.codes) != len(record.durations_us):
            raise LedgerError(f"{record.member}: {len(record.codes)} codes, {len(record.durations_us)} durations at {record.start_us} us")
        try:
            return self._fold(record, floor, members, abandoned)
        except KeyError as error:
            raise LedgerError(f"{record.member}: unknown span code {error} in the record that starts at {record.start_us} us") from error

    def _fold(self, record: Spans, floor: int, members: int, abandoned: list[Abandoned]) -> Folded:
        time_us, step, us, attempt = self.cursor_us, record.step, self.us, self.attempt
        first_commit_us: int | None = None
        last_commit_us: int | None = None  # also of a record whose last attempt does not count, so that no span follows on it
        first_step_us = time_us
        gaps_us: list[int] = []
        charges: list[Charge] = []
        commits, productive_us = 0, 0.0
        for code, duration in zip(record.codes, record.durations_us, strict=True):
            index = INDEX[code]
            if index < STEP_KINDS:
                attempt.append((time_us, duration, index))
                time_us += duration
            elif index < COMMIT_INDEX:
                us[index] += duration
                time_us += duration
                if index in CHARGED:
                    after = bool(attempt) or self.stepped == record.generation
                    charges.append(Charge(index, duration, record.member, record.generation, after))
            elif duration:
                raise LedgerError(f"{record.member}: the mark {code} at {time_us} us has a length of {duration} us, marks have none")
            elif index == COMMIT_INDEX:
                step += 1
                self.stepped = record.generation
                if first_commit_us is None:
                    first_commit_us, first_step_us = time_us, attempt[0][0] if attempt else time_us
                if self.last_commit_us is not None:
                    gaps_us.append(time_us - self.last_commit_us)
                self.last_commit_us = last_commit_us = time_us
                if step > floor:
                    abandoned.append(Abandoned(self.slot, record.generation, attempt, True))
                else:
                    productive_us += self._commit(step, time_us, members, attempt)
                    commits += self.commits[-1].rank_steps
                self.attempt = attempt = []
            else:
                self.stepped = record.generation
                abandoned += self.abandon() if index == ABANDON_INDEX else self.hold()
                attempt = self.attempt
        if attempt:
            self.stepped = record.generation
        self.cursor_us = time_us
        return Folded(first_step_us, first_commit_us, last_commit_us, gaps_us, commits, productive_us, abandoned, charges)

    def _commit(self, step: int, time_us: int, members: int, attempt: list[Piece]) -> float:
        sums, us = [0] * STEP_KINDS, self.us
        for _, duration, index in attempt:
            sums[index] += duration
            us[index] += duration
        productive_us = sum(sums) / members if members else 0.0
        start_us = attempt[0][0] if attempt else time_us
        self.commits.append(Commit(step - 1, step, start_us, time_us, tuple(sums), int(members > 0), productive_us))
        return productive_us

    def roll_back(self, step: int) -> list[Commit]:
        """Move the steps after ``step`` to rework; returns them. Raises LedgerError when they are merged with earlier ones."""
        removed: list[Commit] = []
        while self.commits and self.commits[-1].last > step:
            commit = self.commits.pop()
            if commit.first < step:
                raise LedgerError(
                    f"slot {self.slot}: cannot roll back to step {step}: steps {commit.first + 1} to {commit.last} are kept as one since"
                    f" a checkpoint at step {commit.last} was durable"
                )
            for index, duration in enumerate(commit.step_us):
                self.us[index] -= duration
                self.us[REWORK] += duration
            removed.append(commit)
        return removed

    def compact(self, boundaries: list[int]) -> None:
        """Merge single steps up to the last boundary: a rollback goes back to a boundary, or stays after the last."""
        keep = bisect_left(self.commits, boundaries[-1] + 1, key=lambda commit: commit.last)
        groups: dict[int, list[Commit]] = {}
        for commit in self.commits[:keep]:
            groups.setdefault(bisect_left(boundaries, commit.last), []).append(commit)
        self.commits[:keep] = [merge(group) for group in groups.values()]


IDLE = str.maketrans(dict.fromkeys(STEP_CODES, STANDBY))


def as_idle(record: Spans) -> Spans:
    """The record of a spare that keeps a part of a sharded state in a view: in the steps of the others it stands by."""
    return replace(record, codes=record.codes.translate(IDLE))


def clip(record: Spans, end_us: int) -> Spans:
    """The part of a record up to ``end_us``; a mark at ``end_us`` itself still counts."""
    durations_us: list[int] = []
    time_us = record.start_us
    for duration in record.durations_us:
        if time_us > end_us or (duration and time_us == end_us):
            break
        durations_us.append(min(duration, end_us - time_us))
        time_us += duration
    return replace(record, durations_us=tuple(durations_us), codes=record.codes[: len(durations_us)])


def cut_front(record: Spans, lap_us: int) -> Spans:
    """The record without its first ``lap_us``; shorter spans lose their whole length."""
    durations_us, left = list(record.durations_us), lap_us
    for number, duration in enumerate(durations_us):
        taken = min(left, duration)
        durations_us[number] -= taken
        left -= taken
    return replace(record, start_us=record.start_us + lap_us - left, durations_us=tuple(durations_us))
