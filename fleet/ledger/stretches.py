"""Stretches of a run in which it held machines, and in which it trained: each stop and resume begins a new one.

Between a stop and its resume the run holds no machine, and that time is in no stretch. A stretch's training begins with the first step that
it commits. It ends with its last commit when the stretch ends in order, else with the stretch. Start-up and the work at the end are no part
of it.
"""

from __future__ import annotations

from fleet.protocol.records import RunEnded

FAILED = "failed"
"""A run with this status was in training until its end, even long after its last commit."""


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
        """The time since which the run holds machines without a break."""
        return self.gaps[-1][1] if self.gaps else self.start_us

    @property
    def down_us(self) -> int:
        """How long the run was stopped in all."""
        return sum(back_us - gone_us for gone_us, back_us in self.gaps)

    def stepped(self, first_us: int, commit_us: int) -> None:
        """A rank committed steps; the first of them began at ``first_us``, the last commit was at ``commit_us``."""
        self._begun_us = first_us if self._begun_us is None else min(self._begun_us, first_us)
        self._commit_us = max(self._commit_us, commit_us)

    def stopped(self, gone_us: int, back_us: int, ended: RunEnded | None) -> None:
        """The run held no machine from ``gone_us`` to ``back_us``."""
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
        """The end of the last stretch's training, or ``now_us``."""
        return now_us if ended is None or ended.status == FAILED else min(now_us, self._commit_us)

    def ends_us(self, now_us: int, ended: RunEnded | None) -> list[tuple[int, int]]:
        """For each stretch, the end of its training and its own end; for the last one, ``now_us`` at most."""
        return [*self._ends, (self.until_us(now_us, ended), now_us)]

    def trained_us(self, now_us: int, ended: RunEnded | None) -> int:
        """How long all stretches have trained."""
        return self._trained_us + self.since_begun_us(now_us, ended)
