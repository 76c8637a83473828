"""The stretches of a simulated run in which it trained, and what is left of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.simulation.questions import Schedule

Floats = NDArray[np.float64]


@dataclass(slots=True)
class TallyStretches:
    """Stretches [begin, end) by time, those that still count. ``present`` is the share of the nodes that trained in each; copies to tier j
    were asked for at ``firsts[j]`` and every interval from then on.
    """

    schedules: Sequence[Schedule]
    begin: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    present: list[float] = field(default_factory=list)
    firsts: list[tuple[float, ...]] = field(default_factory=list)
    absent: float = 0.0

    def add(self, begin_s: float, end_s: float, present: float, firsts: tuple[float, ...]) -> None:
        """The job ran from ``begin_s`` to ``end_s``. What was missing then is lost whether the stretch is kept or not."""
        self.begin.append(begin_s)
        self.end.append(end_s)
        self.present.append(present)
        self.firsts.append(firsts)
        self.absent += (end_s - begin_s) * (1.0 - present)

    def shorten(self, lost_s: float) -> float:
        """The end of the last stretch came to nothing. Returns what that is in seconds of the whole fleet."""
        if not self.end:
            return 0.0
        lost_s = min(lost_s, self.end[-1] - self.begin[-1])
        self.end[-1] -= lost_s
        return lost_s * self.present[-1]

    def cut_back(self, until_s: float) -> float:
        """Nothing after ``until_s`` counts any more. Returns what that is in seconds of the whole fleet."""
        lost = 0.0
        while self.end and self.begin[-1] >= until_s:
            self.firsts.pop()
            lost += (self.end.pop() - self.begin.pop()) * self.present.pop()
        if self.end and self.end[-1] > until_s:
            lost += (self.end[-1] - until_s) * self.present[-1]
            self.end[-1] = until_s
        return lost

    def point(self, tier: int, limit_s: float) -> float:
        """When the newest copy to ``tier`` was asked for that was asked for by ``limit_s`` and became safe; 0 when there is none."""
        at = self.schedules[tier]
        for end_s, firsts in zip(reversed(self.end), reversed(self.firsts), strict=True):
            last_s = min(limit_s, end_s - at.latency_s)
            if firsts[tier] <= last_s:
                return firsts[tier] + math.floor((last_s - firsts[tier]) / at.interval_s) * at.interval_s
        return 0.0

    def blocked(self) -> tuple[Floats, list[float]]:
        """(seconds that copies stopped each stretch, [stretches]; number of copies, by tier). None is stopped for longer than it is."""
        begin, end = np.array(self.begin), np.array(self.end)
        total, counts = np.zeros(len(begin)), []
        firsts = np.array(self.firsts).reshape(len(begin), len(self.schedules))
        for tier, at in enumerate(self.schedules):
            first = firsts[:, tier]
            with np.errstate(invalid="ignore"):
                number = np.where(first < end, np.ceil((end - first) / at.interval_s), 0.0)
                last = first + (number - 1) * at.interval_s
            late = np.where(number > 0, np.maximum(0.0, last + at.blocked_s - end), 0.0)
            total += number * at.blocked_s - late
            counts.append(float(number.sum()))
        return np.minimum(total, end - begin), counts

    def slowed(self, begin_s: Floats, end_s: Floats, severity: Floats) -> Floats:
        """Share of each stretch that is lost to slow spells [begin_s, end_s): a step ``severity`` times as long loses the rest."""
        begin, end = np.array(self.begin), np.array(self.end)
        if not len(begin_s) or not len(begin):
            return np.zeros(len(begin))
        loss = 1.0 - 1.0 / severity
        lengths = np.concatenate(([0.0], np.cumsum((end_s - begin_s) * loss)))
        edges, values = np.empty(2 * len(begin_s)), np.empty(2 * len(begin_s))
        edges[0::2], edges[1::2], values[0::2], values[1::2] = begin_s, end_s, lengths[:-1], lengths[1:]
        lost = np.interp(end, edges, values) - np.interp(begin, edges, values)
        return np.asarray(np.divide(lost, end - begin, out=np.zeros(len(begin)), where=end > begin))


def shares_of(
    stretches: TallyStretches, lost: dict[str, float], slow: tuple[Floats, Floats, Floats], span_s: float
) -> tuple[dict[str, float], list[float]]:
    """(shares of the wall clock x nodes that add up to 1, copies by tier) of a run of ``span_s``."""
    blocked, saves = stretches.blocked()
    length, present = np.array(stretches.end) - np.array(stretches.begin), np.array(stretches.present)
    slowed = stretches.slowed(*slow)
    work = (length - blocked) * present
    found = {
        "goodput": float(work @ (1.0 - slowed)),
        "straggler_wait": float(work @ slowed),
        "checkpoint_stall": float(blocked @ present),
        **lost,
    }
    found["provision"] += stretches.absent
    return {name: seconds / span_s for name, seconds in found.items()}, saves
