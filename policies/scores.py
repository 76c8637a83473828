"""How slow each rank is, as pure functions over arrays: relative score, individual score, robust z.

All times enter as natural logarithms of seconds, so that a difference is a ratio. A missing time is NaN, and so is every score that cannot
be told from what there is. Everything is vectorised over ranks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NORMAL_MAD, NORMAL_90 = 0.6745, 1.6449
"""Median and 90% quantile of the size of a standard normal: a MAD over the first estimates a standard deviation."""


def quantiles(values: Array, *shares: float) -> list[Array]:
    """Along the last axis, for each of ``shares``, from 0 to 1, what ``np.quantile`` gives where no value is NaN.

    One pass for all shares, and for a few values without most of what numpy's own takes to begin.
    """
    places = [share * (values.shape[-1] - 1) for share in shares]
    parted = np.partition(values, sorted({edge(place) for place in places for edge in (math.floor, math.ceil)}), axis=-1)
    pairs = [(parted[..., math.floor(place)], parted[..., math.ceil(place)], place % 1) for place in places]
    return [np.asarray(below + (above - below) * weight) for below, above, weight in pairs]


def median(values: Array) -> Array:
    """Along the last axis, as :func:`quantiles`."""
    return quantiles(values, 0.5)[0]


def locations(log_s: Array, least: int) -> tuple[Array, Array]:
    """(median, midmean) of each row of ``log_s`` [ranks, steps]; NaN for a row with fewer than ``least`` times.

    The midmean is the mean of the middle half. Both shrug off a quarter of outliers; the midmean moves in proportion when a rank is slow in
    every other step, where the median jumps or does not move at all.
    """
    ordered = np.sort(log_s, axis=1)  # NaN last
    count = np.isfinite(ordered).sum(axis=1)
    enough = count >= max(least, 1)
    last = np.maximum(count - 1, 0)
    rows = np.arange(len(ordered))
    medians = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    place = np.arange(ordered.shape[1])
    middle = (place >= (count // 4)[:, None]) & (place < (count - count // 4)[:, None])
    sums = np.where(middle, ordered, 0.0).sum(axis=1)
    midmeans = sums / np.maximum(middle.sum(axis=1), 1)
    return np.where(enough, medians, np.nan), np.where(enough, midmeans, np.nan)


def median_of_others(values: Array, slow: NDArray[np.bool_] | None = None) -> Array:
    """For each of ``values`` [ranks] the median of all others; NaN where a value is missing or no other is there.

    Leaving the own value out matters in small worlds: of two ranks the other is the reference, and of four a pair of stragglers cannot
    hide behind each other. Those known to be ``slow`` (a mask) are nobody's reference, while at least two others are.
    """
    known = np.flatnonzero(np.isfinite(values))
    result = np.full(len(values), np.nan)
    if slow is not None and slow.any() and (well := known[~slow[known]]).size >= 2:
        result[well] = median_of_others(values[well])
        ill = known[slow[known]]
        result[ill] = median(values[well])
        return result
    if len(known) < 2:
        return result
    order = known[np.argsort(values[known], kind="stable")]
    ordered, place, others = values[order], np.arange(len(order)), len(order) - 1
    below, above = (others - 1) // 2, others // 2
    result[order] = (ordered[below + (place <= below)] + ordered[above + (place <= above)]) / 2
    return result


def relative_score(own: Array, reference: Array) -> Array:
    """Reference time / own time of logarithms of both: 1 as fast as the others, 0.5 half as fast."""
    return np.exp(reference - own)


def individual_score(best: Array, now: Array) -> Array:
    """Own best time / own time now, of logarithms of both. A slowdown of everybody lowers everybody's."""
    return np.exp(best - now)


def robust_z(values: Array, floor: float = 0.0) -> Array:
    """0.6745 (x - median) / MAD over ``values`` [ranks] (Iglewicz and Hoaglin, 1993); the MAD is not taken below 0.6745 ``floor``."""
    middle = np.nanmedian(values)
    spread = float(np.nanmedian(np.abs(values - middle)))
    return np.asarray(NORMAL_MAD * (values - middle) / max(spread, NORMAL_MAD * floor, 1e-12))


def usual(excesses: Array, least: int, most: float) -> tuple[Array, Array]:
    """(what is usual for each rank, [ranks], ``excesses`` about that) from earlier ``excesses`` [ranks, scores].

    Machines differ: a rank's median excess is its usual one, if there are ``least`` scores of it; 0 before. What is returned for the rank
    is no larger than ``most``, so that one that has been slow from its first step on still stands out.
    """
    ordered, count = np.sort(excesses, axis=1), np.isfinite(excesses).sum(axis=1)
    middle = np.where(count >= least, ordered[np.arange(len(ordered)), np.maximum(count - 1, 0) // 2], 0.0)
    return np.clip(middle, -most, most), excesses - middle[:, None]


def noise(excesses: Array, floor: float) -> tuple[float, float]:
    """(standard deviation, largest size) of the excess of a rank that is well, from earlier ones, [ranks, scores] and centred on 0.

    The deviation is the larger of what their median size and what their 90% quantile would be of, for a normal: tails are often heavier
    than that. Scores of overlapping windows, of drifting clocks and of unequal ranks are all in it: it is what a score does when nothing is
    wrong, whatever the reason. Infinite while there is none: then nothing is beyond it.
    """
    known = np.abs(excesses[np.isfinite(excesses)])
    if not known.size:
        return math.inf, math.inf
    half, most = quantiles(known, 0.5, 0.9)
    return max(floor, float(half) / NORMAL_MAD, float(most) / NORMAL_90), max(floor, float(known.max()))


def without_apart(excesses: Array, least: float) -> Array:
    """``excesses`` [ranks, scores] without the ranks that were apart by ``least`` or more all the time, if they are a minority.

    A rank that has been slow from the first step on is no measure of what a rank does that is well. It shifts what the others are compared
    with, so theirs are then taken from their own median.
    """
    known = np.isfinite(excesses)
    if not known.any():
        return excesses
    ordered, last = np.sort(excesses, axis=1), np.maximum(known.sum(axis=1) - 1, 0)
    rows = np.arange(len(ordered))
    apart = ordered[rows, last // 10] >= least
    if not apart.any() or 2 * apart.sum() >= len(excesses):
        return excesses
    middle = ordered[rows, last // 2]
    return np.asarray(np.where(apart[:, None], np.nan, excesses - middle[:, None]))


def window_noise(log_s: Array) -> float:
    """Standard error of the median of a window ``log_s`` [ranks, steps], of the typical rank: 1.2533 sd / sqrt(steps), sd by the MAD.

    It is all that is known before there are earlier scores, and it grows at once when times begin to scatter.
    """
    whole = bool(np.isfinite(log_s).all())
    middle = median if whole else _known_median  # the second is much slower
    known = np.isfinite(log_s).sum(axis=1)
    if (known == 0).any():
        return 0.0
    sd = middle(np.abs(log_s - middle(log_s)[:, None])) / NORMAL_MAD
    return float(median(1.2533 * sd / np.sqrt(known)))


def _known_median(values: Array) -> Array:
    return np.asarray(np.nanmedian(values, axis=-1))
