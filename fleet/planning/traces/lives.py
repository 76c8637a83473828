"""Exponential, Weibull and lognormal lives by maximum likelihood, with lives of unknown end (censored).

Arrays are [lives]; ``seen`` is 1 for a life with a known end, and 0 for a life that is only known to be longer. Sources: Lawless 2003,
Statistical Models and Methods for Lifetime Data, chapters 4 and 5. Olsen 1978, Econometrica 46: for laws that shift and stretch ln x by u
and b, the likelihood has one top in (u/b, 1/b).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import root
from scipy.special import log_ndtr

Floats = NDArray[np.float64]
EXPONENTIAL, WEIBULL, LOGNORMAL = "exponential", "weibull", "lognormal"
LEAST_SHAPE, MOST_SHAPE = 0.02, 50.0
ENOUGH = 1e-10
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class LifeLaw:
    """A law of lives with two parameters; the exponential law uses only the second.

    ``fit(lives, seen)`` -> (first, second); ``of(first, second)`` -> scipy's distribution with these.
    """

    name: str
    parameters: tuple[str, str]
    free: int
    fit: Callable[[Floats, Floats], tuple[float, float]]
    of: Callable[[float, float], Any]

    def log_likelihood(self, lives: Floats, seen: Floats, first: float, second: float) -> float:
        """The log-likelihood of these lives."""
        law = self.of(first, second)
        return float(np.sum(law.logpdf(lives[seen > 0])) + np.sum(law.logsf(lives[seen == 0])))

    def mean(self, first: float, second: float) -> float:
        """The mean of a life; inf where it is too long for a number."""
        with np.errstate(over="ignore"):
            return float(self.of(first, second).mean())


def _fit_exponential(lives: Floats, seen: Floats) -> tuple[float, float]:
    return 1.0, float(lives.sum() / seen.sum())


def _fit_weibull(lives: Floats, seen: Floats) -> tuple[float, float]:
    middle, spread = _likeliest(lives, seen, lambda z: np.exp(z) - seen)
    return min(MOST_SHAPE, max(LEAST_SHAPE, 1 / spread)), math.exp(middle)


def _fit_lognormal(lives: Floats, seen: Floats) -> tuple[float, float]:
    return _likeliest(lives, seen, lambda z: np.where(seen > 0, z, np.exp(-0.5 * z * z - HALF_LOG_2PI - log_ndtr(-z))))


def _likeliest(lives: Floats, seen: Floats, slope: Callable[[Floats], Floats]) -> tuple[float, float]:
    """(u, b): with z = (ln x - u) / b, ``slope(z)`` is minus the derivative of each life's log-likelihood by z."""
    logs, ends = np.log(lives), seen.sum()
    centre, wide = float(logs.mean()), max(float(logs.std()), 1e-6)
    apart = (logs - centre) / wide

    def both(at: Floats) -> tuple[float, float]:
        slopes = slope(np.exp(at[1]) * apart - at[0])
        return slopes.sum() / ends, np.exp(at[1]) * (slopes * apart).sum() / ends - 1.0

    shift, rise = root(both, (0.0, 0.0), options={"xtol": ENOUGH}).x
    spread = wide / math.exp(rise)
    return centre + float(shift) * spread, spread


LAWS = {
    EXPONENTIAL: LifeLaw(EXPONENTIAL, ("", "mean_s"), 1, _fit_exponential, lambda _, mean: stats.expon(scale=mean)),
    WEIBULL: LifeLaw(WEIBULL, ("shape", "scale_s"), 2, _fit_weibull, lambda shape, scale: stats.weibull_min(shape, scale=scale)),
    LOGNORMAL: LifeLaw(LOGNORMAL, ("mu", "sigma"), 2, _fit_lognormal, lambda mu, sigma: stats.lognorm(sigma, scale=math.exp(mu))),
}


def interval(law: LifeLaw, lives: Floats, seen: Floats, first: float, second: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """95% intervals of both parameters from the curvature at the top (Wald), on the logarithm of positive parameters.

    For the exponential law, only the second: its count is Poisson's, so that the interval of the logarithm is 1.96 / sqrt(n) wide.
    """
    if law.free == 1:
        half = math.exp(Z95 / math.sqrt(float(seen.sum())))
        return (first, first), (second / half, second * half)
    logs = (law.name != LOGNORMAL, True)
    at = np.array([math.log(value) if log else value for value, log in zip((first, second), logs, strict=True)])

    def height(point: Floats) -> float:
        one, two = (math.exp(value) if log else float(value) for value, log in zip(point, logs, strict=True))
        return law.log_likelihood(lives, seen, one, two)

    spread = _spread(height, at)
    ends = [(value - Z95 * wide, value + Z95 * wide) for value, wide in zip(at, spread, strict=True)]
    low_high = [(math.exp(low), math.exp(high)) if log else (float(low), float(high)) for (low, high), log in zip(ends, logs, strict=True)]
    return low_high[0], low_high[1]


def _spread(height: Callable[[Floats], float], at: Floats, step: float = 1e-3) -> Floats:
    """Standard errors: square roots of the diagonal of the inverse of minus the second derivatives, by differences."""
    one, two = np.array([step, 0.0]), np.array([0.0, step])
    top = height(at)
    across = (height(at + one + two) - height(at + one - two) - height(at - one + two) + height(at - one - two)) / (4 * step**2)
    bends = [(height(at + move) - 2 * top + height(at - move)) / step**2 for move in (one, two)]
    determinant = bends[0] * bends[1] - across**2
    if determinant <= 0 or bends[0] >= 0:
        return np.array([math.inf, math.inf])
    return np.sqrt(np.array([-bends[1], -bends[0]]) / determinant)
