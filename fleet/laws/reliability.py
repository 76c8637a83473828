"""How often a fleet fails. Rates add: n units in series fail n times as often as one."""

from __future__ import annotations

import math
from collections.abc import Iterable

DAY_S = 86_400.0


def mtbf_s(mttf_s: float, units: float) -> float:
    """Mean time between failures of ``units`` equal parts, any of which stops the job: MTTF / N."""
    return mttf_s / units


def series_mttf_s(parts: Iterable[tuple[float, float]]) -> float:
    """MTTF of parts in series, given as (MTTF of one, count): 1 / sum(count / MTTF)."""
    return 1.0 / sum(count / mttf for mttf, count in parts)


def failure_probability(duration_s: float, mean_s: float) -> float:
    """P(at least one failure in ``duration_s``) = 1 - exp(-t/M), exponential failures."""
    return -math.expm1(-duration_s / mean_s)


def expected_failures(duration_s: float, mean_s: float) -> float:
    """t/M."""
    return duration_s / mean_s


def all_survive(reliability: float, units: int) -> float:
    """Probability that none of ``units`` independent parts fails: R^N."""
    return math.pow(reliability, units)


def any_slow(share: float, units: int) -> float:
    """Probability that a request that waits for all of ``units`` meets a slow one: 1 - (1 - p)^N."""
    return 1.0 - math.pow(1.0 - share, units)


def straggler_loss(relative_speed: float) -> float:
    """What a synchronous fleet loses when its slowest rank runs at ``relative_speed``: 1 - speed."""
    return 1.0 - relative_speed


def recovery_share(recovery_s: float, mean_s: float) -> float:
    """Share of the wall clock spent in recovery when failures are ``mean_s`` apart on that clock: recovery / M."""
    return recovery_s / mean_s


def rate_per_unit_day(failures: float, units: float, duration_s: float) -> float:
    """Failures per unit and day."""
    return failures / (units * duration_s / DAY_S)


def poisson_halfwidth(count: float, z: float = 1.96) -> float:
    """Half width of the normal 95% interval of a Poisson count: z sqrt(n)."""
    return z * math.sqrt(count)


def mean_down(units: float, rate_per_s: float, repair_s: float) -> float:
    """Mean number of units in repair, when every unit has a crew: N lambda MTTR; the number is about Poisson with this mean."""
    return units * rate_per_s * repair_s


def poisson_quantile(mean: float, probability: float) -> int:
    """The smallest n with P(Poisson(mean) <= n) >= probability: spares that cover the repairs with that probability."""
    count, log_term = 0, -mean
    total = math.exp(log_term)
    while total < probability and count < 1_000 + 10 * mean:
        count += 1
        log_term += math.log(mean / count)
        total += math.exp(log_term)
    return count


def weibull_scale_s(mean_s: float, shape: float) -> float:
    """eta of a Weibull lifetime with the given mean: mean / Gamma(1 + 1/k)."""
    return mean_s / math.gamma(1.0 + 1.0 / shape)


def weibull_hazard_per_s(age_s: float, scale_s: float, shape: float) -> float:
    """h(t) = (k/eta)(t/eta)^(k-1): falls with age for k < 1 (infant mortality), rises for k > 1 (wear)."""
    return shape / scale_s * math.pow(age_s / scale_s, shape - 1.0)


def weibull_survival(age_s: float, scale_s: float, shape: float) -> float:
    """P(life > t) = exp(-(t/eta)^k)."""
    return math.exp(-math.pow(age_s / scale_s, shape))


def renew_all_mtbf_s(scale_s: float, shape: float, units: float) -> float:
    """MTBF if every failure renewed all N parts: eta Gamma(1+1/k) N^(-1/k). Far too pessimistic for k < 1; here to show by how much."""
    return scale_s * math.gamma(1.0 + 1.0 / shape) * math.pow(units, -1.0 / shape)


def all_lost_rate_per_s(fault_rate_per_s: float, groups: int, repair_s: float) -> float:
    """Rate at which ``groups`` independent groups are down at the same time, each mended ``repair_s`` after its fault.

    ``fault_rate_per_s`` is the rate over all groups together. Each group is up a share A = 1/(1 + a r) of the time, a = rate/groups,
    r = repair; the last one falls at a x P(exactly one is up) = a k A (1 - A)^(k-1) (independent two-state machines in balance).
    """
    each = fault_rate_per_s / groups
    down = each * repair_s / (1.0 + each * repair_s)
    return each * groups * (1.0 - down) * math.pow(down, groups - 1)
