"""Decides when Ray Train's controller may see a death. Pure: conditions of workers in, failures to show out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Condition(Enum):
    """The condition of one worker in one poll."""

    RUNNING = "running"
    DONE = "done"
    PENDING = "pending"
    """The worker has not answered yet."""
    HUNG = "hung"
    """The worker has not answered for longer than the time-out."""
    UNSURE = "unsure"
    """The worker cannot be reached, but Ray has not confirmed its death: perhaps its node is gone."""
    RAISED = "raised"
    """The train function raised; the process is alive."""
    DEAD = "dead"


FAILED = frozenset({Condition.RAISED, Condition.DEAD})
UNSETTLED = frozenset({Condition.PENDING, Condition.HUNG, Condition.UNSURE})
"""A call to such a worker may block the caller for long."""


@dataclass(frozen=True)
class Backoff:
    """Delay before the next worker of a slot whose workers repeatedly fail soon after their start."""

    stable_s: float = 3.0
    """A worker that lives this long did not fail at its start. With 10 s, ranks killed one after the other in a storm of faults counted as
    ranks that cannot start, and waited for up to 30 s."""
    free: int = 2
    """So many early failures in a row cause no delay."""
    first_s: float = 1.0
    limit_s: float = 30.0

    def delay_s(self, streak: int) -> float:
        """Delay after ``streak`` early failures in a row."""
        return 0.0 if streak <= self.free else min(self.limit_s, self.first_s * 2.0 ** min(streak - self.free - 1, 32))


@dataclass(frozen=True)
class PollVerdict:
    """The decision after one poll.

    ``finish``: ranks to report as finished, since all others have. ``restart``: show all failures, so that Ray Train starts the whole group
    again. ``candidate``: the one rank whose failure may be shown, if its slot has a place and the others answer. All other failures are
    hidden. ``kill``: ranks to kill, because they hang.
    """

    finish: frozenset[int] = frozenset()
    restart: bool = False
    candidate: int | None = None
    kill: frozenset[int] = frozenset()
    reason: str = ""
    """Why there is a failure but no candidate."""


@dataclass
class _Slot:
    started_s: float
    streak: int = 0
    failed: bool = False
    failed_s: float = 0.0
    due_s: float = 0.0


@dataclass
class DeathWatch:
    """Follows the workers of one group over its polls. Times are seconds on a clock that does not go back.

    ``settle_s``: the delay between a death and its replacement. The survivors form the next view and take the broken step meanwhile. A
    process that starts beside them would take processor time for which all of them wait.
    """

    backoff: Backoff = field(default_factory=Backoff)
    settle_s: float = 0.4
    _slots: dict[int, _Slot] = field(default_factory=dict)

    def started(self, rank: int, now_s: float) -> None:
        """A new worker fills the slot."""
        slot = self._slots.setdefault(rank, _Slot(now_s))
        slot.started_s, slot.failed = now_s, False

    def attempt_failed(self, rank: int, now_s: float) -> None:
        """A replacement did not start."""
        slot = self._slots.setdefault(rank, _Slot(now_s))
        self._fail(slot, now_s, early=True)

    def judge(self, conditions: Mapping[int, Condition], now_s: float) -> PollVerdict:
        """The decision for one poll of all ranks. Call it once a poll, as it notes failures."""
        failed = self._note(conditions, now_s)
        kill = frozenset(rank for rank, condition in conditions.items() if condition is Condition.HUNG)
        others = {rank for rank in conditions if rank not in failed}
        if failed and others and all(conditions[rank] is Condition.DONE for rank in others):
            return PollVerdict(finish=frozenset(failed))
        due = sorted((slot.due_s, rank) for rank, slot in self._slots.items() if rank in failed and slot.due_s <= now_s)
        if failed and not others:
            return PollVerdict(restart=len(due) == len(failed))
        unsettled = sorted(rank for rank in others if conditions[rank] in UNSETTLED)
        if failed and unsettled:
            return PollVerdict(kill=kill, reason=f"ranks {sorted(failed)} wait for ranks {unsettled} to answer or to be lost")
        if failed and not due:
            return PollVerdict(kill=kill, reason=f"ranks {sorted(failed)} wait: they keep failing soon after their start")
        settled = [rank for _, rank in due if self._slots[rank].failed_s + self.settle_s <= now_s]
        return PollVerdict(candidate=settled[0] if settled else None, kill=kill)

    def _note(self, conditions: Mapping[int, Condition], now_s: float) -> set[int]:
        failed = {rank for rank, condition in conditions.items() if condition in FAILED}
        for rank in conditions:
            slot = self._slots.setdefault(rank, _Slot(now_s))
            if rank in failed and not slot.failed:
                self._fail(slot, now_s, early=now_s - slot.started_s < self.backoff.stable_s)
        return failed

    def _fail(self, slot: _Slot, now_s: float, early: bool) -> None:
        slot.streak = slot.streak + 1 if early else 0
        slot.failed, slot.failed_s, slot.due_s = True, now_s, now_s + self.backoff.delay_s(slot.streak)
