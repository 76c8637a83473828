"""When a run held machines, and when it trained: a run that is stopped and resumed does both in stretches.

Between a stop and its resume nobody holds a machine: that time is nobody's. A stretch's training lasts from the start of the first step
that it commits to its last commit when it ends in order, else to its end. Starting up and the work at the end are no part of it.
"""

from __future__ import annotations

from fleet.protocol.records import RunEnded

FAILED = "failed"
"""A run that ends so was in training until then, whenever its last commit was."""


class Stretches:
    """Times are microseconds on the run's clock."""

    def __init__(self, start_us: int = 0) -> None:
        self.start_us = start_us
        self.gaps: list[tuple[int, int]] = []
        self._ends: list[tuple[int, int]] = []
        self._trained_us = 0
        self._begun_us: int | None = None
        self._commit_us = 0

    @property
    def back_us(self) -> int:
        """Since when the run holds machines without a break."""
        return self.gaps[-1][1] if self.gaps else self.start_us

    @property
    def down_us(self) -> int:
        """How long it was stopped in all."""
        return sum(back_us - gone_us for gone_us, back_us in self.gaps)

    def stepped(self, first_us: int, commit_us: int) -> None:
        """A rank committed steps; the first of them began at ``first_us``, the last was committed at ``commit_us``."""
        self._begun_us = first_us if self._begun_us is None else min(self._begun_us, first_us)
        self._commit_us = max(self._commit_us, commit_us)

    def stopped(self, gone_us: int, back_us: int, ended: RunEnded | None) -> None:
        """Nobody held a machine from ``gone_us`` to ``back_us``."""
        self._trained_us += self.since_begun_us(gone_us, ended)
        self._ends.append((self.until_us(gone_us, ended), gone_us))
        self._begun_us = None
        self.gaps.append((gone_us, back_us))

    def since_begun_us(self, now_us: int, ended: RunEnded | None) -> int:
        """How long this stretch has trained."""
        if self._begun_us is None:
            return 0
        return max(0, self.until_us(now_us, ended) - self._begun_us)

    def until_us(self, now_us: int, ended: RunEnded | None) -> int:
        """When the last stretch's training ended, or ``now_us``."""
        return now_us if ended is None or ended.status == FAILED else min(now_us, self._commit_us)

    def ends_us(self, now_us: int, ended: RunEnded | None) -> list[tuple[int, int]]:
        """When training ended in each stretch, and when the stretch did; of the last one by now."""
        return [*self._ends, (self.until_us(now_us, ended), now_us)]

    def trained_us(self, now_us: int, ended: RunEnded | None) -> int:
        """How long all stretches have trained."""
        return self._trained_us + self.since_begun_us(now_us, ended)
