"""How far a run was when: steps over time in a bounded number of points, for curves and for the time that is left."""

from __future__ import annotations

import statistics
from itertools import pairwise

from fleet.protocol.records import Committed, HistoryBegun, Record

MOST = 2_000
RECENT = 64
"""The median step of so many newest commits is the speed now."""


class Pace:
    """Commits as (at_s, step) on the run's clock, folded record by record; steps that were rolled back are taken out.

    Args:
        most: of more points every second one goes.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._recent: list[tuple[float, int]] = []
        self.points: list[tuple[float, int]] = []

    def add(self, record: Record) -> None:
        match record:
            case HistoryBegun(from_state=state):
                self.points = [point for point in self.points if point[1] <= state.step]
                self._recent = []
            case Committed(at_s=at_s, state=state) if not self.points or state.step > self.points[-1][1]:
                self.points.append((at_s, state.step))
                self._recent = [*self._recent[-RECENT:], (at_s, state.step)]
                if len(self.points) > self._most:
                    del self.points[1:-1:2]

    @property
    def step_s(self) -> float | None:
        """Median seconds from one of the newest commits to the next; None before the second."""
        gaps = [(after[0] - before[0]) / (after[1] - before[1]) for before, after in pairwise(self._recent)]
        return statistics.median(gaps) if gaps else None


def remaining_s(steps: int, total_steps: int | None, step_s: float | None, goodput: float) -> float | None:
    """Seconds until ``total_steps`` are committed, at ``step_s`` a step and the share of time that becomes steps; None while unknown."""
    if total_steps is None or step_s is None or goodput <= 0.0:
        return None
    return max(0, total_steps - steps) * step_s / min(1.0, goodput)
