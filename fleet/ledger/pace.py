"""The progress of a run over time, in a bounded number of points, for curves and for the time that is left. And a limit to the cost of
chaos: chaos stops when the share of the pace over a trailing window falls below the floor. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from fleet.protocol.decisions import Figures
from fleet.protocol.events import FloorReached
from fleet.protocol.facts import FaultRecord
from fleet.protocol.records import Committed, DecisionMade, HistoryBegun, Record

MOST = 2_000
RECENT = 64
"""The median step of so many newest commits is the speed now."""


class Pace:
    """Commits as (at_s, step) on the run's clock, folded record by record. Steps that were rolled back are taken out.

    Args:
        most: with more points, every second one goes.
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
    """Seconds until ``total_steps`` are committed, at ``step_s`` a step and this goodput; None while unknown."""
    if total_steps is None or step_s is None or goodput <= 0.0:
        return None
    return max(0, total_steps - steps) * step_s / min(1.0, goodput)


WINDOW_S = 30.0
"""The length of the window over which the run's steps are compared with its own pace, unless the user names another."""
LEAST_STEPS = 10
"""The pace is learned from at least so many steps without a fault."""


class Floor:
    """Takes committed steps as they come, and tells when too little of the pace is left.

    The pace is the median step before the first fault. Where a fault came too early, it is the median of the first steps. So faults cannot
    lower the pace that they are measured by. A long evaluation counts as a stall.

    Args:
        share: from 0 to 1; chaos stops once less than this is left.
        window_s: length of the trailing window.
    """

    def __init__(self, share: float, window_s: float = WINDOW_S) -> None:
        self.share, self._window_s = share, window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._gaps_s: list[float] = []
        self._injected = False

    def injected(self) -> None:
        """A fault was carried out: later steps do not show the pace."""
        self._injected = True

    def see(self, at_s: float, step: int) -> None:
        """``step`` is the newest committed one, at ``at_s``."""
        last_s, last = self._seen[-1] if self._seen else (at_s, -1)
        if step <= last:
            return
        if self._seen and (not self._injected or len(self._gaps_s) < LEAST_STEPS):
            self._gaps_s.append((at_s - last_s) / (step - last))
        self._seen.append((at_s, step))
        while at_s - self._seen[0][0] > 2 * self._window_s:
            self._seen.popleft()

    def kept(self, now_s: float) -> float | None:
        """Share of the pace over the trailing window: steps in it, times the usual step, over its length. None: not known yet."""
        if len(self._gaps_s) < LEAST_STEPS or not self._seen or now_s - self._seen[0][0] < self._window_s:
            return None
        before = [step for at_s, step in self._seen if at_s <= now_s - self._window_s]
        steps = self._seen[-1][1] - (before[-1] if before else self._seen[0][1])
        return steps * statistics.median(self._gaps_s) / self._window_s

    def broken(self, now_s: float) -> bool:
        """Whether less than ``share`` is left, and a fault may be the cause."""
        kept = self.kept(now_s) if self._injected else None
        return kept is not None and kept < self.share


def least_goodput(records: Iterable[Record], window_s: float) -> float | None:
    """The least share of a run's own pace over any ``window_s`` seconds that end with a commit; None: the run was shorter."""
    floor, found = Floor(0.0, window_s), list[float]()
    for record in records:
        match record:
            case FaultRecord(phase="executed"):
                floor.injected()
            case Committed(at_s=at_s, state=state):
                floor.see(at_s, state.step)
                kept = floor.kept(at_s)
                found += [] if kept is None else [kept]
    return min(found, default=None)


def stops(event: FloorReached, now_s: float) -> DecisionMade:
    """The journal's decision when the floor is reached."""
    reason = f"{event.kept:.0%} of the pace is left, less than {event.floor:.0%}: all faults are healed, and no more faults strike"
    return DecisionMade("floor", "stop", reason, Figures({"kept": event.kept, "floor": event.floor}), now_s)
