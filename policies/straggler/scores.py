"""Slowness of each rank, as pure functions over arrays: medians, usual values, and the excess over them.

All times enter as natural logarithms of seconds, so that a difference is a ratio. A missing time is NaN, and so is every score without
enough times. All functions are vectorised over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NORMAL_MAD, NORMAL_90 = 0.6745, 1.6449
"""Median and 90% quantile of the size of a standard normal: a MAD over the first estimates a standard deviation."""

MEDIAN_VARIANCE = math.pi / 2
"""Variance of the median of many normal values, times that of their mean."""

FEW_TIMES, FEW_OF_A_RANK = 12, 6
"""With fewer times, in all and of one rank, there are no figures."""

LAGS, PRIOR_STEPS, PRIOR_MEMORY, MOST_MEMORY = 8, 20, 2.5, 4.0


def quantiles(values: Array, *shares: float) -> list[Array]:
    """Along the last axis, for each of ``shares``, from 0 to 1, the result of ``np.quantile`` where no value is NaN.

    One pass serves all shares. For few values it avoids most of the overhead of numpy's own function.
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

    The midmean is the mean of the middle half. Both ignore a quarter of outliers. When a rank is slow in every other step, the midmean
    moves in proportion, and the median jumps or does not move at all.
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
    """For each of ``values`` [ranks] the median of all others; NaN where a value is missing or there is no other.

    To leave out the own value matters in small worlds. Of two ranks the other is the reference, and of four ranks a pair of stragglers
    cannot hide behind each other. Ranks known to be ``slow`` (a mask) are no reference, while there are at least two others.
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


@dataclass(frozen=True, slots=True)
class Usual:
    """The known behaviour of well ranks.

    Attributes:
        apart: the usual log(own / others) of each rank, [ranks]: machines differ.
        doubt: standard deviation of that estimate, [ranks].
        noise: standard deviation of one step about that; infinite while it is unknown: then no step is beyond it.
        memory: the variance of a mean over steps, over its value for steps that are independent of each other.
    """

    apart: Array
    doubt: Array
    noise: float
    memory: float


def usual(past: Array, spread: float, most: float, floor: float) -> Usual:
    """The usual values, from earlier log(own / others) ``past`` [ranks, steps] of well ranks, NaN where they were not well.

    A rank's usual value is its median, weighed against a normal prior: machines differ by ``spread`` (a standard deviation). It is the mean
    of that posterior. It is at most ``most``, so that a rank that has been slow since its first step stands out.

    The noise is the larger of two estimates of a normal's deviation, from the median size and from the 90% quantile. Tails are often
    heavier than normal. The noise is at least ``floor``.
    """
    known = np.isfinite(past)
    if known.sum() < FEW_TIMES:
        return Usual(np.zeros(len(past)), np.full(len(past), spread), math.inf, 1.0)
    count = np.where(known.sum(axis=1) >= FEW_OF_A_RANK, known.sum(axis=1), 0)
    ordered = np.sort(past, axis=1)  # NaN last
    middle = np.where(count, ordered[np.arange(len(past)), np.maximum(count - 1, 0) // 2], 0.0)
    centred = past - middle[:, None]
    half, largest = quantiles(np.abs(centred[known]), 0.5, 0.9)
    noise = max(floor, float(half) / NORMAL_MAD, float(largest) / NORMAL_90)
    remembered = memory(centred, noise)
    seen = count / (MEDIAN_VARIANCE * noise**2 * remembered)
    sure = seen + 1 / spread**2
    return Usual(np.clip(middle * seen / sure, -most, most), 1 / np.sqrt(sure), noise, remembered)


def memory(centred: Array, noise: float) -> float:
    """1 + 2 x the sum of autocorrelations of ``centred`` [ranks, steps] up to ``LAGS`` steps; from 1 to ``MOST_MEMORY``.

    Few steps hardly determine it: they are weighed against ``PRIOR_STEPS`` steps with ``PRIOR_MEMORY``.
    """
    known = np.isfinite(centred)
    values = np.where(known, np.clip(centred, -3 * noise, 3 * noise), 0.0)
    variance, total = float(np.mean(values[known] ** 2)), 0.0
    for lag in range(1, LAGS + 1):
        pairs = np.count_nonzero(known[:, lag:] & known[:, :-lag])
        if pairs < FEW_TIMES or not variance:
            break
        total += float((values[:, lag:] * values[:, :-lag]).sum()) / pairs / variance  # an unknown value is 0
    steps = int(known.any(axis=0).sum())
    found = (steps * (1 + 2 * max(0.0, total)) + PRIOR_STEPS * PRIOR_MEMORY) / (steps + PRIOR_STEPS)
    return min(found, MOST_MEMORY)
