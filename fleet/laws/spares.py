"""Spares, as the machine repair problem: N units are needed, S stand by cold, c crews repair.

With n units down the fleet fails at rate min(N, N + S - n) lambda. The crews repair at rate min(n, c) / MTTR. All times are exponential.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.laws.law import Count, CountOrZero, NonNegative, Positive, Probability, Share, law
from fleet.laws.reliability import mean_down, poisson_quantile

REPAIRMEN = "Palm 1947; Gross et al. 2008, Fundamentals of Queueing Theory, sec. 2.7"
RATE = 3.8e-3 / 86_400.0
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Repair:
    """The balance of a fleet with spares.

    Attributes:
        mean_down: mean number of units in repair or waiting for it.
        short_probability: P(more units down than spares): the fleet is not whole.
        missing: mean number of units that the fleet lacks, max(0, n - S).
    """

    mean_down: float
    short_probability: float
    missing: float


def down_distribution(units: int, spares: int, rate_per_s: float, repair_s: float, crews: int | None = None) -> NDArray[np.float64]:
    """P(n units down), n = 0..units + spares, shape (units + spares + 1,); ``crews`` None: one for every unit."""
    down = np.arange(1, int(units + spares) + 1, dtype=np.float64)
    failing = np.minimum(units, units + spares - (down - 1)) * rate_per_s
    repairing = np.minimum(down, np.inf if crews is None else crews) / repair_s
    logs = np.concatenate(([0.0], np.cumsum(np.log(failing / repairing))))
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


@law(REPAIRMEN, elementwise=True, units=2048, spares=16, rate_per_s=RATE, repair_s=DAY)
def machine_repair(units: Count, spares: CountOrZero, rate_per_s: Positive, repair_s: Positive, crews: int | None = None) -> Repair:
    """Machine repair in balance: p(n) proportional to the product of failure rates / repair rates up to n."""
    _check_crews(crews)
    chances = down_distribution(units, spares, rate_per_s, repair_s, crews)
    down = np.arange(chances.size)
    short = float(chances[int(spares) + 1 :].sum())
    return Repair(float(chances @ down), short, float(chances @ np.maximum(0, down - spares)))


@law(REPAIRMEN, elementwise=True, units=2048, rate_per_s=RATE, repair_s=DAY, risk=0.01)
def spares_for_risk(units: Count, rate_per_s: Positive, repair_s: Positive, risk: Probability, crews: int | None = None) -> int:
    """The fewest spares S with P(n > S) <= risk in the machine repair balance. Bisected.

    Raises:
        ConfigError: the crews cannot keep up, so that no number of spares is enough.
    """
    _check_crews(crews)
    if risk <= 0.0:
        raise ConfigError("risk", risk, "no finite number of spares rules it out", "Give a risk greater than 0, such as 0.01.")
    if crews is not None and units * rate_per_s * repair_s >= crews:
        needed = int(np.floor(units * rate_per_s * repair_s)) + 1
        raise ConfigError("crews", crews, "units break faster than the crews repair them", f"The nearest valid value is {needed}.")
    enough = max(1, poisson_quantile(mean_down(units, rate_per_s, repair_s), 1.0 - risk))
    while machine_repair(units, enough, rate_per_s, repair_s, crews).short_probability > risk:
        enough *= 2
    low = -1
    while enough - low > 1:
        middle = (low + enough) // 2
        short = machine_repair(units, middle, rate_per_s, repair_s, crews).short_probability
        low, enough = (low, middle) if short <= risk else (middle, enough)
    return enough


def _check_crews(crews: int | None) -> None:
    if crews is not None and crews < 1:
        raise ConfigError("crews", crews, "must be at least 1", "The nearest valid value is 1; None gives every unit its own.")


@law("alternating renewal process", mttf_s=1.0 / RATE, repair_s=DAY)
def availability(mttf_s: Positive, repair_s: NonNegative) -> float:
    """Share of time that one unit works: MTTF / (MTTF + MTTR)."""
    return mttf_s / (mttf_s + repair_s)


@law("share of capacity bought and not used", units=2048, spares=16)
def spare_share(units: Positive, spares: NonNegative) -> float:
    """Share of all units that stand by: S / (N + S)."""
    return spares / (units + spares)


@law("lemons: a share of the nodes fails more often; Kokolis et al. 2024, arXiv 2410.21680", rate_per_s=RATE, share=0.012, factor=10.0)
def rate_with_lemons_per_s(rate_per_s: NonNegative, share: Share, factor: NonNegative) -> float:
    """Mean failure rate of a node when a share fails ``factor`` times as often: lambda (1 + share (factor - 1))."""
    return rate_per_s * (1.0 + share * (factor - 1.0))
