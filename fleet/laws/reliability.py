"""The rate of a fleet's failures. Rates add: n units in series fail n times as often as one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fleet.errors import ConfigError
from fleet.laws.law import (
    DAY_S,
    HOUR_S,
    Count,
    NonNegative,
    Positive,
    PositiveShare,
    Probability,
    Share,
    ceil,
    exp,
    expm1,
    law,
    maximum,
    power,
    sqrt,
)

GPU_MTTF_S = 50_000.0 * HOUR_S
"""MTTF of one GPU without a better figure: 50,677 h at Llama 3's 419 interruptions (arXiv 2407.21783), rounded."""

NODE_PARTS = ((50_000.0 * HOUR_S, 8), (150_000.0 * HOUR_S, 8), (100_000.0 * HOUR_S, 2))
"""(MTTF in seconds, count) of GPUs, NICs and power supplies of one node, Machine Learning Systems (textbook), vol. 2, appendix Fleet."""

DEPENDABILITY = "reliability theory: minimum of independent exponential lives"


@law(DEPENDABILITY, mttf_s=GPU_MTTF_S, units=16_384)
def mtbf_s(mttf_s: Positive, units: Positive) -> float:
    """Mean time between failures of ``units`` equal parts, any of which stops the job: MTTF / N."""
    return mttf_s / units


@law("Cox 1962, Renewal Theory: failures per unit of exposure", failures=419, units=16_384, duration_s=54 * DAY_S)
def unit_mttf_s(failures: Positive, units: Positive, duration_s: Positive) -> float:
    """MTTF of one unit, from a count: units x duration / failures."""
    return units * duration_s / failures


@law(DEPENDABILITY, parts=NODE_PARTS)
def series_mttf_s(parts: Iterable[tuple[float, float]]) -> float:
    """MTTF of parts in series, given as (MTTF of one, count): 1 / sum(count / MTTF)."""
    rate = 0.0
    for mttf, count in parts:
        if not (np.all(np.asarray(mttf) > 0) and np.all(np.asarray(count) >= 0)):
            raise ConfigError("parts", (mttf, count), "an MTTF must be greater than 0, and a count at least 0")
        rate += count / mttf
    if not np.all(np.asarray(rate) > 0):
        raise ConfigError("parts", (), "there is no part that can fail", "Name at least one part.")
    return 1.0 / rate


@law("Trivedi 2001, Probability and Statistics with Reliability, sec. 3.6 and 8.2", elementwise=True,
     mttf_s=100_000 * HOUR_S, parts=2, needed=1, repair_s=24 * HOUR_S)  # fmt: skip
def redundant_mttf_s(mttf_s: Positive, parts: Count, needed: Count = 1, repair_s: NonNegative = 0.0) -> float:
    """Mean time until fewer than ``needed`` of ``parts`` work, all new at first: sum over states of the mean passage time down one state.

    ``repair_s`` = 0 means none: MTTF x sum of 1/i for i = needed..parts. Else each broken part has its own repair crew.
    Passage from i working parts: h(i) = (1 + r(i) h(i + 1)) / (i/MTTF), r(i) = (parts - i) / repair.
    """
    if needed > parts:
        raise ConfigError("needed", needed, f"only {parts:g} parts are there", f"The nearest valid value is {parts:g}.")
    total, above = 0.0, 0.0
    for working in range(int(parts), int(needed) - 1, -1):
        repaired = (parts - working) / repair_s if repair_s > 0 else 0.0
        above = (1.0 + repaired * above) * mttf_s / working
        total += above
    return total


@law(DEPENDABILITY, node_mttf_s=15_428_571.0, nodes_per_rack=4, gpus_per_node=8, gpus=16_384)
def mtbf_cascade_s(node_mttf_s: Positive, nodes_per_rack: Positive, gpus_per_node: Positive, gpus: Positive) -> dict[str, float]:
    """MTBF of one node, one rack and the whole fleet, in seconds: MTTF / units at each level."""
    nodes = gpus / gpus_per_node
    return {"node": node_mttf_s, "rack": node_mttf_s / nodes_per_rack, "fleet": node_mttf_s / nodes}


@law("Marshall & Olkin 1967, JASA 62: independent shocks", unit_mttf_s=GPU_MTTF_S, units=16_384, groups=((64, 50_000 * HOUR_S),))
def shock_mtbf_s(unit_mttf_s: Positive, units: Positive, groups: Iterable[tuple[float, float]] = ()) -> float:
    """MTBF of a job whose units also fall in groups: 1 / (N/MTTF + sum over kinds of groups of ceil(N / size) / MTTF of a group).

    ``groups`` are (units in a rack, switch or power domain; MTTF of its shocks in seconds).
    """
    rate = units / unit_mttf_s
    for size, mttf_s in groups:
        if not (size >= 1 and mttf_s > 0):
            raise ConfigError("groups", (size, mttf_s), "a group has at least 1 unit, and an MTTF greater than 0 s")
        rate = rate + ceil(units / size) / mttf_s
    return 1.0 / rate


@law("exponential law", duration_s=DAY_S, mean_s=24.4 * HOUR_S)
def failure_probability(duration_s: NonNegative, mean_s: Positive) -> float:
    """P(at least one failure in ``duration_s``) = 1 - exp(-t/M), exponential failures."""
    return -expm1(-duration_s / mean_s)


@law("Poisson law", duration_s=30 * DAY_S, mean_s=67 * HOUR_S)
def expected_failures(duration_s: NonNegative, mean_s: Positive) -> float:
    """Expected number of failures: t / M."""
    return duration_s / mean_s


@law("independence", reliability=0.999, units=1000)
def all_survive(reliability: Share, units: NonNegative) -> float:
    """Probability that none of ``units`` independent parts fails: R^N."""
    return power(reliability, units)


@law("Dean & Barroso 2013, The Tail at Scale, CACM 56(2)", share=0.01, units=100)
def any_slow(share: Share, units: NonNegative) -> float:
    """Probability that a request that waits for all of ``units`` meets a slow one: 1 - (1 - p)^N."""
    return 1.0 - power(1.0 - share, units)


@law("synchronous training waits for the slowest rank", relative_speed=0.8)
def straggler_loss(relative_speed: PositiveShare) -> float:
    """Loss of a synchronous fleet whose slowest rank runs at ``relative_speed``: 1 - speed."""
    return 1.0 - relative_speed


@law("renewal reward: downtime per cycle", recovery_s=20 * 60.0, mean_s=2 * HOUR_S)
def recovery_share(recovery_s: NonNegative, mean_s: Positive) -> float:
    """Share of the wall clock spent in recovery when failures are ``mean_s`` apart on that clock: recovery / M."""
    return recovery_s / mean_s


@law("wall-clock reading of a published claim: 100,000 GPUs, a failure every 18 min", stall_s=600.0, mean_s=1080.0)
def effective_share(stall_s: NonNegative, mean_s: Positive) -> float:
    """Share of the wall clock left when each failure stalls the job: (M - stall) / M, 0 when a stall lasts until the next failure."""
    return maximum(0.0, 1.0 - stall_s / mean_s)


@law("budget of Machine Learning Systems (textbook), vol. 2, appendix Fleet", overheads=(0.05, 0.03, 0.10, 0.05))
def overhead_goodput(overheads: Iterable[float]) -> float:
    """Goodput after additive overheads, each a share of the wall clock: 1 - sum."""
    shares = [*overheads]
    if min(shares, default=0.0) < 0 or sum(shares) > 1:
        raise ConfigError("overheads", tuple(shares), "shares of the wall clock are at least 0 and add up to at most 1")
    return 1.0 - sum(shares)


@law("failures per exposure", failures=419, units=2048, duration_s=54 * DAY_S)
def rate_per_unit_day(failures: NonNegative, units: Positive, duration_s: Positive) -> float:
    """Failures per unit and day: n / (N x days)."""
    return failures / (units * duration_s / DAY_S)


@law("normal approximation of a Poisson count", count=419)
def poisson_halfwidth(count: NonNegative, z: Positive = 1.96) -> float:
    """Half width of the normal 95% interval of a Poisson count: z sqrt(n)."""
    return z * sqrt(count)


@law("Palm 1943: M/G/infinity", units=12_500, rate_per_s=3.8e-3 / DAY_S, repair_s=DAY_S)
def mean_down(units: NonNegative, rate_per_s: NonNegative, repair_s: NonNegative) -> float:
    """Mean number of units in repair, when every unit has a crew: N lambda MTTR; the number is about Poisson with this mean."""
    return units * rate_per_s * repair_s


@law("Poisson law", elementwise=True, mean=47.5, probability=0.999)
def poisson_quantile(mean: NonNegative, probability: Probability) -> int:
    """The smallest n with P(Poisson(mean) <= n) >= probability: spares that cover the repairs with that probability."""
    if mean == 0.0:
        return 0
    counts = np.arange(int(mean + 40.0 * math.sqrt(mean) + 100.0))
    logs = np.concatenate(([0.0], np.cumsum(np.log(mean / counts[1:]))))
    weights = np.exp(logs - logs.max())
    return int(np.searchsorted(np.cumsum(weights) / weights.sum(), probability))


def gamma_below(shape: float, value: float) -> float:
    """P(X <= value) of a Gamma law of this shape and of rate 1."""
    from scipy.special import gammainc

    return float(gammainc(shape, value))


@law("Weibull 1951", mean_s=100.0, shape=0.7, elementwise=True)
def weibull_scale_s(mean_s: Positive, shape: Positive) -> float:
    """eta of a Weibull lifetime with the given mean: mean / Gamma(1 + 1/k)."""
    return mean_s / math.gamma(1.0 + 1.0 / shape)


@law("Weibull 1951", age_s=10.0, scale_s=79.0, shape=0.7)
def weibull_hazard_per_s(age_s: Positive, scale_s: Positive, shape: Positive) -> float:
    """h(t) = (k/eta)(t/eta)^(k-1): falls with age for k < 1 (infant mortality), rises for k > 1 (wear)."""
    return shape / scale_s * power(age_s / scale_s, shape - 1.0)


@law("Weibull 1951", age_s=79.0, scale_s=79.0, shape=0.7)
def weibull_survival(age_s: NonNegative, scale_s: Positive, shape: Positive) -> float:
    """P(life > t) = exp(-(t/eta)^k)."""
    return exp(-power(age_s / scale_s, shape))


@law("minimum of N Weibull lives; Heien et al. 2011 (SC) on why not", scale_s=79.0, shape=0.7, units=1000, elementwise=True)
def renew_all_mtbf_s(scale_s: Positive, shape: Positive, units: Positive) -> float:
    """MTBF if every failure renewed all N parts: eta Gamma(1+1/k) N^(-1/k). Far too pessimistic for k < 1; it shows by how much."""
    return scale_s * math.gamma(1.0 + 1.0 / shape) * math.pow(units, -1.0 / shape)


@law("two-state machines in balance", fault_rate_per_s=1e-4, groups=2, repair_s=60.0)
def all_lost_rate_per_s(fault_rate_per_s: NonNegative, groups: Count, repair_s: NonNegative) -> float:
    """Rate at which ``groups`` independent groups are down at the same time, each mended ``repair_s`` after its fault: a k A (1 - A)^(k-1).

    ``fault_rate_per_s`` is the rate over all groups together. The groups are independent two-state machines in balance. Each is up a share
    A = 1/(1 + a r) of the time, a = rate/groups, r = repair. The last group falls at a x P(exactly one is up) = a k A (1 - A)^(k-1).
    """
    each = fault_rate_per_s / groups
    down = each * repair_s / (1.0 + each * repair_s)
    return each * groups * (1.0 - down) * power(down, groups - 1)
