"""Compares two policies on the same faults: which one loses less, and how sure that is.

Each pair is two policies on one trace; their difference varies far less than either. A user may look at an ordinary interval after every
pair, and stop when it excludes zero. That would decide too often by chance. This module has an interval that may be looked at after every
pair, for differences in a known range. With probability 1 - alpha it covers the mean at all times at once.

Source: Waudby-Smith and Ramdas (2024), Estimating means of bounded random variables by betting, JRSS-B 86(1), theorem 3. The interval is a
confidence sequence: the hedged capital process with predictable plug-in bets.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fleet.errors import ConfigError

GRID = 2_001
"""Number of candidate means: it sets the resolution of the interval."""
TRUNCATION = 0.75
"""The largest share of its capital that a gambler puts at stake."""
MOST_PAIRS = 2_000
"""Most pairs for which ``would_decide`` looks ahead."""


@dataclass(frozen=True, slots=True)
class PairedVerdict:
    """The verdict on ``pairs`` pairs. ``mean``: the mean difference, first policy less second.

    ``low``, ``high``: an interval that may be looked at after every pair. ``fixed_low``, ``fixed_high``: Student's interval. It is
    narrower, and right only when the number of pairs was fixed beforehand. ``decided``: ``first``, ``second`` or ``same`` (the difference
    is surely below ``least``), else empty. ``would_decide``: the number of pairs that would decide if later pairs differed like these.
    None: it is decided, or needs more than ``MOST_PAIRS``, or there are fewer than two pairs.
    """

    pairs: int
    mean: float
    low: float
    high: float
    fixed_low: float
    fixed_high: float
    decided: str
    would_decide: int | None = None


class Sequential:
    """The confidence sequence of a mean of differences in ``-span..span``.

    Args:
        alpha: probability of ever being wrong.
        span: the greatest difference there can be; goodputs differ by at most 1.
        least: differences below this are no difference.
    """

    def __init__(self, alpha: float = 0.05, span: float = 1.0, least: float = 0.0005) -> None:
        if not 0 < alpha < 1:
            raise ConfigError("alpha", alpha, "a probability between 0 and 1", "0.05 is customary.")
        if not 0 < least < span < math.inf:
            raise ConfigError("least", least, f"must lie above 0 and below the span of {span:g}")
        self.alpha, self.span, self.least = alpha, span, least
        self.values: list[float] = []
        self._means = np.linspace(0.0, 1.0, GRID)
        self._up, self._down = np.zeros(GRID), np.zeros(GRID)
        self._sum, self._squares = 0.5, 0.25
        self._alive = np.full(GRID, True)

    def add(self, difference: float) -> PairedVerdict:
        """One more pair. Raises ConfigError for a difference outside the span."""
        if not -self.span <= difference <= self.span:
            raise ConfigError("difference", difference, f"outside {-self.span:g}..{self.span:g}", "Compare shares of the wall clock.")
        self._take(difference)
        return self.verdict()

    def would_decide(self) -> int | None:
        """The number of pairs that would decide if the differences so far were repeated in their order. See :class:`PairedVerdict`."""
        if len(self.values) < 2 or self._decided():
            return None
        ahead = copy.deepcopy(self)
        for number in range(MOST_PAIRS - len(self.values)):
            ahead._take(self.values[number % len(self.values)])
            if ahead._decided():
                return len(ahead.values)
        return None

    def _take(self, difference: float) -> None:
        self.values.append(difference)
        self._bet((difference / self.span + 1.0) / 2.0)

    def _bet(self, value: float) -> None:
        """Update the capital of two gamblers for each candidate mean: one bets that the mean is too low, one that it is too high."""
        number = len(self.values)
        variance = self._squares / number
        bet = math.sqrt(2 * math.log(2 / self.alpha) / (variance * number * math.log(number + 1)))
        means = np.clip(self._means, 1e-9, 1 - 1e-9)
        self._up += np.log1p(np.minimum(bet, TRUNCATION / means) * (value - means))
        self._down += np.log1p(-np.minimum(bet, TRUNCATION / (1 - means)) * (value - means))
        self._alive &= np.maximum(self._up, self._down) < math.log(2 / self.alpha)
        self._sum += value
        self._squares += (value - self._sum / (number + 1)) ** 2

    def verdict(self) -> PairedVerdict:
        """The present verdict; it needs at least one pair."""
        low, high = self._bounds()
        mean = float(np.mean(self.values))
        return PairedVerdict(len(self.values), mean, low, high, *student(self.values, self.alpha), self._decided())

    def _bounds(self) -> tuple[float, float]:
        kept = np.flatnonzero(self._alive)
        step = 2 * self.span / (GRID - 1)
        mean = float(np.mean(self.values)) if not len(kept) else 0.0
        low, high = ((2 * self._means[edge] - 1) * self.span for edge in (kept[0], kept[-1])) if len(kept) else (mean, mean)
        return float(low - step), float(high + step)

    def _decided(self) -> str:
        low, high = self._bounds()
        return "first" if low > 0 else "second" if high < 0 else "same" if -self.least < low and high < self.least else ""


def student(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """Student's interval of the mean; infinite for fewer than 2 values."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = stats.t.ppf(1 - alpha / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values) - half), float(np.mean(values) + half)


def compare(pairs: Iterable[tuple[float, float]], test: Sequential) -> Iterator[PairedVerdict]:
    """A verdict after each pair of shares. The last one comes when the test is decided, or after the last pair."""
    for first, second in pairs:
        verdict = test.add(first - second)
        yield verdict
        if verdict.decided:
            return
