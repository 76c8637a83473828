"""What is fitted is what the faults were drawn with, and intervals hold the truth as often as they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fleet.planning.traces.fit import TraceFit, count_interval, fit, times_between
from fleet.planning.traces.goodness import distance, probability
from fleet.planning.traces.importing import Log, LogCluster, LogEntry, as_trace, from_trace
from fleet.planning.traces.lives import EXPONENTIAL, LAWS, LOGNORMAL, WEIBULL, interval
from fleet.planning.traces.mapping import LogMapping
from fleet.planning.traces.trace import read_trace

HOUR_S, DAY_S = 3600.0, 86_400.0
BEGAN_S = 1.0e9
TRUTH = {EXPONENTIAL: (1.0, 100.0), WEIBULL: (0.7, 100.0), LOGNORMAL: (4.0, 1.3)}


def rng_of(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def log_of(nodes: int, days: float, life: Callable[[np.random.Generator], float], seed: int, component: str = "gpu") -> Log:
    """A log in which the times between faults of a node are ``life``'s. What came in its first half is not in it: nodes are of all ages."""
    rng, entries = rng_of(seed), list[LogEntry]()
    for node in range(nodes):
        at_s = life(rng)
        while at_s < 2 * days * DAY_S:
            if at_s >= days * DAY_S:
                entries.append(LogEntry(BEGAN_S + at_s, f"n{node}", component, component, float(rng.lognormal(8, 1)), len(entries) + 2))
            at_s += life(rng)
    return whole(entries, nodes, BEGAN_S + days * DAY_S, BEGAN_S + 2 * days * DAY_S)


def whole(entries: list[LogEntry], nodes: int, began_s: float, ended_s: float) -> Log:
    group = LogCluster(nodes, began_s, ended_s)
    ordered = tuple(sorted(entries, key=lambda entry: entry.at_s))
    return Log(ordered, (), len(entries), LogMapping(), {"": group}, group.node_s, "nodes x time")


def steady(mean_s: float) -> Callable[[np.random.Generator], float]:
    return lambda rng: float(rng.exponential(mean_s))


# ---- laws --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("cut", [math.inf, 120.0])
def test_a_law_gives_its_parameters_back_also_where_most_lives_are_cut_off(law: str, cut: float) -> None:
    kind, truth = LAWS[law], TRUTH[law]
    lives = kind.of(*truth).ppf(rng_of(7).random(20_000))
    seen, lives = (lives <= cut).astype(float), np.minimum(lives, cut)
    first, second = kind.fit(lives, seen)
    assert first == pytest.approx(truth[0], rel=0.03) and second == pytest.approx(truth[1], rel=0.04)
    low_high = interval(kind, lives, seen, first, second)
    assert all(low <= value <= high for (low, high), value in zip(low_high, (first, second), strict=True))


@pytest.mark.parametrize("law", [WEIBULL, LOGNORMAL])
def test_the_fit_is_scipys_where_nothing_is_cut_off(law: str) -> None:
    kind = LAWS[law]
    lives = kind.of(*TRUTH[law]).ppf(rng_of(3).random(500))
    first, second = kind.fit(lives, np.ones(500))
    ours = kind.log_likelihood(lives, np.ones(500), first, second)
    theirs = stats.weibull_min.fit(lives, floc=0) if law == WEIBULL else stats.lognorm.fit(lives, floc=0)
    reference = stats.weibull_min if law == WEIBULL else stats.lognorm
    assert ours == pytest.approx(float(reference.logpdf(lives, *theirs).sum()), rel=1e-6)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), law=st.sampled_from(sorted(LAWS)), count=st.integers(5, 60), cut=st.floats(0.3, 3.0))
def test_no_parameters_nearby_are_likelier(seed: int, law: str, count: int, cut: float) -> None:
    kind, truth = LAWS[law], TRUTH[law]
    lives = kind.of(*truth).ppf(rng_of(seed).random(count))
    limit = cut * float(np.median(lives))
    seen, lives = (lives <= limit).astype(float), np.minimum(lives, limit)
    if seen.sum() < 3:
        return
    first, second = kind.fit(lives, seen)
    best = kind.log_likelihood(lives, seen, first, second)
    for one, two in ((1.02, 1.0), (0.98, 1.0), (1.0, 1.02), (1.0, 0.98)):
        if kind.free == 2 or one == 1.0:
            near = kind.log_likelihood(lives, seen, first * one, second * two)
            assert near <= best + 1e-7 * max(1.0, abs(best))


def test_intervals_of_a_shape_hold_it_as_often_as_they_say() -> None:
    kind, rng, inside = LAWS[WEIBULL], rng_of(11), 0
    for _ in range(300):
        lives = kind.of(0.7, 100.0).ppf(rng.random(80))
        seen, lives = (lives <= 250.0).astype(float), np.minimum(lives, 250.0)
        first, second = kind.fit(lives, seen)
        (low, high), _ = interval(kind, lives, seen, first, second)
        inside += low <= 0.7 <= high
    assert 0.91 <= inside / 300 <= 0.985


@pytest.mark.parametrize("count", [0, 1, 4, 30])
def test_intervals_of_a_count_hold_its_mean(count: int) -> None:
    low, high = count_interval(count)
    assert stats.poisson.cdf(count, high) == pytest.approx(0.025)
    assert low == 0.0 if not count else stats.poisson.sf(count - 1, low) == pytest.approx(0.025)


def test_intervals_of_rates_hold_them_as_often_as_they_say() -> None:
    mean_s, inside = 40 * DAY_S, 0
    for seed in range(200):
        rate = fit(log_of(20, 10.0, steady(mean_s), seed)).total
        inside += rate.low_hours <= mean_s / HOUR_S <= rate.high_hours
    assert inside / 200 >= 0.94, "the exact interval is never too narrow"


# ---- goodness of fit ---------------------------------------------------------------------------------------------------------------------


def test_lives_that_follow_the_law_are_seldom_said_not_to_and_others_mostly() -> None:
    rng = rng_of(5)
    limits = np.full(300, 200.0)
    rejected = dict.fromkeys((EXPONENTIAL, LOGNORMAL), 0)
    for name in rejected:
        for _ in range(60):
            lives = LAWS[name].of(*TRUTH[name]).ppf(rng.random(300))
            seen, lives = (lives <= limits).astype(float), np.minimum(lives, limits)
            rejected[name] += probability(EXPONENTIAL, lives, seen, limits, rng) < 0.05
    assert rejected[EXPONENTIAL] <= 9 and rejected[LOGNORMAL] >= 40


def test_the_distance_is_that_of_kolmogorov_where_nothing_is_cut_off() -> None:
    lives = rng_of(2).exponential(10.0, 200)
    theirs = stats.kstest(lives, stats.expon(scale=12.0).cdf).statistic
    assert distance(EXPONENTIAL, lives, np.ones(200), 1.0, 12.0) == pytest.approx(theirs, abs=1e-12)
    tied = np.array([1.0, 1.0, 2.0, 2.0, 2.0, 5.0])
    assert distance(EXPONENTIAL, tied, np.ones(6), 1.0, 2.0) == pytest.approx(stats.kstest(tied, stats.expon(scale=2.0).cdf).statistic)


# ---- whole logs --------------------------------------------------------------------------------------------------------------------------


def test_a_log_gives_back_what_it_was_drawn_with() -> None:
    shape, mean_s = 0.7, 30 * DAY_S
    scale_s = mean_s / math.gamma(1 + 1 / shape)
    log = log_of(300, 365.0, lambda rng: float(scale_s * rng.weibull(shape)), 1)
    found = fit(log)
    rate, lives = found.total, found.between["all"]
    assert rate.mttf_hours == pytest.approx(mean_s / HOUR_S, rel=0.05)
    assert lives.best is not None and lives.best.law == WEIBULL and lives.best.p is not None and lives.best.p > 0.01
    assert lives.best.parameters["shape"][0] == pytest.approx(shape, abs=0.03)
    assert found.repairs is not None and found.repairs.best is not None and found.repairs.best.law == LOGNORMAL
    assert found.faults().components["gpu"].shape == pytest.approx(shape, abs=0.03)
    assert found.faults().repair_hours == pytest.approx(math.exp(8.5) / HOUR_S, rel=0.1)


def test_a_steady_log_has_no_habits() -> None:
    found = fit(log_of(200, 365.0, steady(60 * DAY_S), 4))
    assert found.bursts is not None and not found.bursts.found and not found.offenders.nodes
    assert found.trend is not None and found.trend.verdict == "steady"
    assert found.dispersion == pytest.approx(1.0, abs=0.35)
    assert found.faults().burst == 0.0 and found.faults().lemon_factor == 1.0 and found.faults().components["gpu"].shape is None


def test_bursts_are_found_and_their_share() -> None:
    quiet, rng = log_of(200, 365.0, steady(60 * DAY_S), 9), rng_of(9)
    leaders = [entry for entry in quiet.entries if rng.random() < 0.2]
    drawn = [LogEntry(each.at_s + float(rng.exponential(20.0)), f"n{rng.integers(200)}", "gpu", "gpu", None, 0) for each in leaders]
    found = fit(whole([*quiet.entries, *drawn], 200, quiet.began_s, quiet.ended_s + 600.0)).bursts
    assert found is not None and found.found and found.share == pytest.approx(0.2, abs=0.05) and found.largest >= 2
    assert found.mean_s < 200.0


def test_repeat_offenders_are_found_and_nobody_else() -> None:
    quiet = log_of(200, 365.0, steady(60 * DAY_S), 2)
    bad = [
        LogEntry(quiet.began_s + 365 * DAY_S * float(at), name, "gpu", "gpu", None, 0)
        for name in ("n3", "n77")
        for at in rng_of(1).random(80)
    ]
    found = fit(whole([*quiet.entries, *bad], 200, quiet.began_s, quiet.ended_s)).offenders
    assert {each.node for each in found.nodes} == {"n3", "n77"}
    assert found.share == 0.01 and found.factor == pytest.approx(86 / 6, rel=0.15)


def _times(found: Callable[[np.ndarray], np.ndarray], seed: int) -> TraceFit:
    shares = np.sort(found(rng_of(seed).random(400)))
    entries = [LogEntry(BEGAN_S + 365 * DAY_S * float(at), f"n{number % 100}", "gpu", "gpu", None, 0) for number, at in enumerate(shares)]
    return fit(whole(entries, 100, BEGAN_S, BEGAN_S + 365 * DAY_S))


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "steady"), (0.6, "rising"), (1.8, "falling")])
def test_a_trend_is_found(power: float, verdict: str) -> None:
    found = _times(lambda shares: shares**power, 6).trend
    assert found is not None and found.verdict == verdict


def test_a_longer_log_with_the_same_faults_means_longer_lives() -> None:
    log = log_of(50, 100.0, steady(30 * DAY_S), 8)
    lives, seen, limits = times_between(log.entries, log, True)
    nodes = len({entry.node for entry in log.entries})
    assert int(seen.sum()) == len(log.entries) - nodes and len(lives) == len(log.entries)
    assert np.all(lives <= limits + 1e-6)


@settings(max_examples=15)
@given(seed=st.integers(0, 1000))
def test_a_log_and_its_trace_say_the_same(seed: int) -> None:
    log = log_of(10, 60.0, steady(20 * DAY_S), seed)
    if not log.entries:
        return
    one, other = fit(log).faults(), fit(from_trace(read_trace(as_trace(log)))).faults()
    assert one.components.keys() == other.components.keys() and one.mttf_hours == pytest.approx(other.mttf_hours)
    assert one.repair_hours == pytest.approx(other.repair_hours)
