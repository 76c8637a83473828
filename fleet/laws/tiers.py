"""Checkpoints of several levels, and failures that are not exponential. Symbols as in :mod:`fleet.laws.checkpointing`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.laws.checkpointing import young_work_s
from fleet.laws.law import NonNegative, Positive, PositiveShare, law, sqrt
from fleet.laws.reliability import weibull_hazard_per_s, weibull_scale_s, weibull_survival

MULTI_LEVEL = "Moody et al. 2010 (SC), SCR; Benoit et al. 2017, IEEE TC 66(7): first order"
RENEWAL = "renewal reward: Ross 1996, Stochastic Processes, sec. 3.6"
DIRECT_TERMS = 4096


@law(MULTI_LEVEL, blocked_s=(1.0, 10.0, 60.0), rates_per_s=(1e-4, 2e-5, 2e-6))
def multilevel_work_s(blocked_s: Sequence[float], rates_per_s: Sequence[float]) -> NDArray[np.float64]:
    """Work between two checkpoints of each level: w_l = sqrt(2 C_l / lambda_l), lambda_l the rate of the failures that need level l."""
    blocked, rates = _levels(blocked_s, rates_per_s)
    return np.sqrt(2.0 * blocked / rates)


@law(MULTI_LEVEL, blocked_s=(1.0, 10.0, 60.0), rates_per_s=(1e-4, 2e-5, 2e-6))
def multilevel_overhead(blocked_s: Sequence[float], rates_per_s: Sequence[float]) -> float:
    """Time lost per unit of work at those intervals, restarts aside: sum of sqrt(2 lambda_l C_l)."""
    blocked, rates = _levels(blocked_s, rates_per_s)
    return float(np.sum(np.sqrt(2.0 * rates * blocked)))


def _levels(blocked_s: Sequence[float], rates_per_s: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    blocked, rates = np.asarray(blocked_s, dtype=np.float64), np.asarray(rates_per_s, dtype=np.float64)
    if blocked.shape != rates.shape:
        raise ConfigError("rates_per_s", rates_per_s, f"{rates.size} rates for {blocked.size} levels", "Give one of each for every level.")
    if not np.all((blocked >= 0) & np.isfinite(blocked)):
        raise ConfigError("blocked_s", blocked_s, "a checkpoint blocks for at least 0 s")
    if not np.all((rates > 0) & np.isfinite(rates)):
        raise ConfigError("rates_per_s", rates_per_s, "must be greater than 0", "Leave out levels that no failure needs.")
    return blocked, rates


@law(RENEWAL, elementwise=True, work_s=600.0, blocked_s=60.0, mtbf_s=7200.0, shape=0.7, recovery_s=300.0)
def weibull_goodput(work_s: Positive, blocked_s: NonNegative, mtbf_s: Positive, shape: Positive, recovery_s: NonNegative = 0.0) -> float:
    """Goodput when lives are Weibull and every failure renews: w sum over j >= 1 of S(j (w + C)) / (M + recovery), exact.

    S(t) = exp(-(t/eta)^k) with mean M; checkpoints are equally spaced, recovery cannot fail. k = 1 is the exponential case.
    """
    scale_s, period_s = weibull_scale_s(mtbf_s, shape), work_s + blocked_s
    return work_s * _finished_segments(period_s, scale_s, shape) / (mtbf_s + recovery_s)


def _finished_segments(period_s: float, scale_s: float, shape: float) -> float:
    """sum over j >= 1 of S(j period): the first terms as they are, the smooth rest by Euler and Maclaurin."""
    total = float(np.sum(np.exp(-np.power(np.arange(1, DIRECT_TERMS + 1) * period_s / scale_s, shape))))
    edge_s = DIRECT_TERMS * period_s
    survival = float(weibull_survival(edge_s, scale_s, shape))
    if survival < 1e-18:
        return total
    from scipy.special import gamma, gammaincc

    integral_s = scale_s / shape * gamma(1.0 / shape) * gammaincc(1.0 / shape, (edge_s / scale_s) ** shape)
    slope = -survival * weibull_hazard_per_s(edge_s, scale_s, shape)
    return total + float(integral_s) / period_s - survival / 2.0 - period_s * slope / 12.0


@law(f"{RENEWAL}, maximised", elementwise=True, blocked_s=60.0, mtbf_s=7200.0, shape=0.7)
def weibull_work_s(blocked_s: Positive, mtbf_s: Positive, shape: Positive) -> float:
    """Work between equally spaced checkpoints at which :func:`weibull_goodput` is greatest, by Brent's method around sqrt(2CM)."""
    from scipy.optimize import minimize_scalar

    centre = math.log(young_work_s(blocked_s, mtbf_s))
    lost = minimize_scalar(
        lambda x: -weibull_goodput(math.exp(x), blocked_s, mtbf_s, shape), bounds=(centre - 3.0, centre + 3.0), options={"xatol": 1e-8}
    )
    return math.exp(float(lost.x))


@law("Young's argument with the hazard of the moment; Ling et al. 2001, IEEE TC 50(7)", blocked_s=60.0, age_s=3600.0, scale_s=5700.0,
     shape=0.7)  # fmt: skip
def weibull_next_work_s(blocked_s: NonNegative, age_s: Positive, scale_s: Positive, shape: Positive) -> float:
    """Work until the next checkpoint at age t: sqrt(2 C / h(t)). Spacing widens with age for k < 1, and narrows for k > 1."""
    return sqrt(2.0 * blocked_s / weibull_hazard_per_s(age_s, scale_s, shape))


@law("nested segments: each level's segment is the work of the level above; exact for one level", shares=(0.99, 0.98))
def nested_goodput(shares: Sequence[PositiveShare]) -> float:
    """Goodput of independent levels, each with its own checkpoints and failures: product of the levels' goodputs."""
    values = [float(share) for share in shares]
    if not all(0.0 < value <= 1.0 for value in values):
        raise ConfigError("shares", tuple(values), "each level's goodput must be above 0 and at most 1")
    return math.prod(values)
