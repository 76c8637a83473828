"""Exponential, Weibull and lognormal lives by maximum likelihood, with lives whose end was not seen (censored), many samples at once.

Arrays are [samples, lives] or [lives]; ``seen`` is 1 where a life's end was seen and 0 where it was only known to be longer. Sources:
Lawless 2003, Statistical Models and Methods for Lifetime Data, ch. 4 and 5; Olsen 1978, Econometrica 46, for the lognormal: in (mu/sigma,
1/sigma) its likelihood has one top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfinv, log_ndtr, ndtr

Floats = NDArray[np.float64]
EXPONENTIAL, WEIBULL, LOGNORMAL = "exponential", "weibull", "lognormal"
LEAST_SHAPE, MOST_SHAPE = 0.02, 50.0
STEPS, ENOUGH = 60, 1e-9
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class LifeLaw:
    """A law of lives with two parameters, of which the exponential law uses the second alone.

    ``fit(lives, seen)`` -> (first, second), each [samples]; ``log_density``, ``log_survival`` of (lives, first, second).
    """

    name: str
    parameters: tuple[str, str]
    free: int
    fit: Callable[[Floats, Floats], tuple[Floats, Floats]]
    log_density: Callable[[Floats, Floats, Floats], Floats]
    log_survival: Callable[[Floats, Floats, Floats], Floats]
    mean: Callable[[float, float], float]
    draw: Callable[[Floats, Floats, Floats], Floats]

    def log_likelihood(self, lives: Floats, seen: Floats, first: Floats, second: Floats) -> Floats:
        """Of each sample."""
        first, second = np.asarray(first)[..., None], np.asarray(second)[..., None]
        each = np.where(seen > 0, self.log_density(lives, first, second), self.log_survival(lives, first, second))
        return np.asarray(each.sum(axis=-1))


def _fit_exponential(lives: Floats, seen: Floats) -> tuple[Floats, Floats]:
    total = np.asarray(lives.sum(axis=-1))
    return np.ones_like(total), total / seen.sum(axis=-1)


def _fit_weibull(lives: Floats, seen: Floats) -> tuple[Floats, Floats]:
    """Newton's steps on the shape: sum(x^k ln x)/sum(x^k) - 1/k = mean of ln x of those seen. The left side only rises with k."""
    logs = np.log(lives)
    top = logs.max(axis=-1, keepdims=True)
    apart, deaths = logs - top, seen.sum(axis=-1)
    wanted = (apart * seen).sum(axis=-1) / deaths
    shape = np.clip(1.2 / np.maximum(np.sqrt(np.maximum(np.var(logs, axis=-1), 1e-12)), 1e-6), 0.1, 10.0)
    for _ in range(STEPS):
        weights = np.exp(shape[..., None] * apart)
        whole = weights.sum(axis=-1)
        first = (weights * apart).sum(axis=-1) / whole
        second = (weights * apart**2).sum(axis=-1) / whole
        step = (first - 1.0 / shape - wanted) / (second - first**2 + 1.0 / shape**2)
        step = np.clip(step, -shape, 0.5 * shape)  # at most twice as large, and not below half
        shape = np.clip(shape - step, LEAST_SHAPE, MOST_SHAPE)
        if np.all(np.abs(step) < ENOUGH * shape):
            break
    mean_power = np.exp(shape[..., None] * apart).sum(axis=-1) / deaths
    return shape, np.exp(top[..., 0]) * mean_power ** (1.0 / shape)


def _fit_lognormal(lives: Floats, seen: Floats) -> tuple[Floats, Floats]:
    """Newton's steps in (mu/sigma, 1/sigma), halved where they go down."""
    logs = np.log(lives)
    centre = logs.mean(axis=-1, keepdims=True)
    apart, deaths = logs - centre, seen.sum(axis=-1)
    rise, shift = 1.0 / np.maximum(np.std(logs, axis=-1), 1e-6), np.zeros_like(deaths, dtype=float)
    best = _olsen(apart, seen, deaths, shift, rise)
    for _ in range(STEPS):
        step_shift, step_rise = _newton(apart, seen, deaths, shift, rise)
        factor = np.where(rise + step_rise > 0, 1.0, np.maximum(0.5 * rise / np.maximum(-step_rise, 1e-300), 1e-12))
        for _ in range(12):
            now = _olsen(apart, seen, deaths, shift + factor * step_shift, rise + factor * step_rise)
            worse = ~(now >= best - 1e-12 * np.abs(best))
            if not worse.any():
                break
            factor = np.where(worse, 0.5 * factor, factor)
        else:
            factor = np.where(worse, 0.0, factor)
        shift, rise = shift + factor * step_shift, rise + factor * step_rise
        best = _olsen(apart, seen, deaths, shift, rise)
        if np.all(np.abs(factor * step_rise) < ENOUGH * rise) and np.all(np.abs(factor * step_shift) < ENOUGH * (1 + np.abs(shift))):
            break
    sigma = 1.0 / rise
    return np.asarray(shift * sigma + centre[..., 0]), np.asarray(sigma)


def _olsen(logs: Floats, seen: Floats, deaths: Floats, shift: Floats, rise: Floats) -> Floats:
    z = rise[..., None] * logs - shift[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(deaths * np.log(rise) + np.where(seen > 0, -0.5 * z * z, log_ndtr(-z)).sum(axis=-1))


def _newton(logs: Floats, seen: Floats, deaths: Floats, shift: Floats, rise: Floats) -> tuple[Floats, Floats]:
    z = rise[..., None] * logs - shift[..., None]
    hazard = np.exp(-0.5 * z * z - HALF_LOG_2PI - log_ndtr(-z))
    slope = np.where(seen > 0, z, hazard)  # minus the derivative of the log-likelihood by z
    bend = np.where(seen > 0, 1.0, hazard * (hazard - z))
    by_shift, by_rise = slope.sum(axis=-1), deaths / rise - (slope * logs).sum(axis=-1)
    shift2, both, rise2 = bend.sum(axis=-1), -(bend * logs).sum(axis=-1), (bend * logs**2).sum(axis=-1) + deaths / rise**2
    scale = shift2 * rise2 - both**2
    return (rise2 * by_shift - both * by_rise) / scale, (shift2 * by_rise - both * by_shift) / scale


LAWS = {
    EXPONENTIAL: LifeLaw(
        EXPONENTIAL, ("", "mean_s"), 1, _fit_exponential,
        log_density=lambda x, _, mean: -np.log(mean) - x / mean,
        log_survival=lambda x, _, mean: -x / mean,
        mean=lambda _, mean: mean,
        draw=lambda uniform, _, mean: -mean * np.log1p(-uniform),
    ),
    WEIBULL: LifeLaw(
        WEIBULL, ("shape", "scale_s"), 2, _fit_weibull,
        log_density=lambda x, shape, scale: np.log(shape / scale) + (shape - 1) * np.log(x / scale) - (x / scale) ** shape,
        log_survival=lambda x, shape, scale: -((x / scale) ** shape),
        mean=lambda shape, scale: scale * math.gamma(1 + 1 / shape),
        draw=lambda uniform, shape, scale: scale * (-np.log1p(-uniform)) ** (1 / shape),
    ),
    LOGNORMAL: LifeLaw(
        LOGNORMAL, ("mu", "sigma"), 2, _fit_lognormal,
        log_density=lambda x, mu, sigma: -0.5 * ((np.log(x) - mu) / sigma) ** 2 - np.log(x * sigma) - HALF_LOG_2PI,
        log_survival=lambda x, mu, sigma: log_ndtr(-(np.log(x) - mu) / sigma),
        mean=lambda mu, sigma: math.exp(min(700.0, mu + 0.5 * sigma**2)),
        draw=lambda uniform, mu, sigma: np.exp(mu + sigma * math.sqrt(2.0) * erfinv(2.0 * uniform - 1.0)),
    ),
}  # fmt: skip


def survival(law: str, lives: Floats, first: float, second: float) -> Floats:
    """P(life > x)."""
    if law == LOGNORMAL:
        return np.asarray(ndtr(-(np.log(lives) - first) / second))
    return np.asarray(np.exp(LAWS[law].log_survival(lives, np.asarray(first), np.asarray(second))))


def interval(law: LifeLaw, lives: Floats, seen: Floats, first: float, second: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """95% intervals of both parameters from the curvature at the top (Wald), on the logarithm of what is positive.

    Of the exponential law the second alone: its count is Poisson's, so that the interval of the logarithm is 1.96 / sqrt(n) wide.
    """
    if law.free == 1:
        half = math.exp(Z95 / math.sqrt(float(seen.sum())))
        return (first, first), (second / half, second * half)
    logs = (law.name != LOGNORMAL, True)
    at = np.array([math.log(value) if log else value for value, log in zip((first, second), logs, strict=True)])

    def height(point: Floats) -> float:
        one, two = (math.exp(value) if log else float(value) for value, log in zip(point, logs, strict=True))
        return float(law.log_likelihood(lives, seen, np.asarray(one), np.asarray(two)))

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
