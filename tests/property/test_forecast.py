"""Intervals hold as often as they say what comes from their own prior, and costs rise with what they are made of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gamma, nbinom

from benchmarks.account_forecast import drawn, simulated_coverage
from fleet.ledger.forecast import FaultImpact, Price, RecoveryTimes, Terms, coming, fault_cost
from fleet.ledger.rates import COVERS, Gamma, Rate, count_interval, prior, together
from fleet.protocol.fault_kinds import TABLE
from fleet.settings.run import RunSettings

RUNS = 600
rates = st.floats(1e-6, 1.0)
times = st.floats(0.01, 100.0)


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


@settings(max_examples=8)
@given(rates, st.floats(0.1, 30.0), st.integers(0, 2**32))
def test_a_posterior_holds_the_rates_of_its_own_prior(rate_per_s: float, expected: float, seed: int) -> None:
    """Rates are drawn from the prior, faults at these rates; the 90% interval after them holds the rate in 90% of the runs."""
    rng, before, exposure_s = generator(seed), prior(rate_per_s), expected / rate_per_s
    inside, seen = 0, dict[int, tuple[float, float]]()
    for _ in range(RUNS):
        true = drawn(before, rng)
        events = int(rng.poisson(true * exposure_s))
        low, high = seen.setdefault(events, before.after(events, exposure_s).interval())
        inside += low <= true <= high
    assert abs(inside / RUNS - COVERS) < 0.06, "almost five standard deviations"


def test_forecasts_of_simulated_runs_hold_as_often_as_they_say() -> None:
    assert 0.87 <= simulated_coverage(400) <= 0.93


@settings(max_examples=60)
@given(st.floats(0.02, 5_000.0), st.floats(1e-3, 1e3), st.floats(0.01, 0.99))
def test_quantiles_are_those_of_the_gamma_law(shape: float, rate: float, share: float) -> None:
    assert Gamma(shape, rate).quantile(share) == pytest.approx(gamma(shape, scale=1 / rate).ppf(share), rel=3e-3, abs=1e-50)


@settings(max_examples=40)
@given(st.floats(0.5, 50.0), st.floats(1.0, 1e5), st.floats(1.0, 1e5))
def test_counts_are_negative_binomial(shape: float, exposure_s: float, ahead_s: float) -> None:
    low, high = count_interval(Rate(((1.0, Gamma(shape, exposure_s)),)), ahead_s)
    law = nbinom(shape, exposure_s / (exposure_s + ahead_s))
    if shape / exposure_s * ahead_s < 900:
        assert low == pytest.approx(law.ppf(0.05), abs=1) and high == pytest.approx(law.ppf(0.95), abs=1)
    assert law.cdf(high) - law.cdf(low - 1) >= 0.88


@settings(max_examples=60)
@given(rates, st.integers(0, 50), st.floats(1.0, 1e6))
def test_more_faults_mean_a_higher_rate_and_more_time_a_lower_one(rate_per_s: float, events: int, exposure_s: float) -> None:
    before = prior(rate_per_s)
    now = before.after(events, exposure_s)
    low, high = now.interval()
    assert low <= high and now.variance > 0 and abs(sum(weight for weight, _ in now.parts) - 1) < 1e-9
    assert before.after(events + 1, exposure_s).mean >= now.mean * (1 - 1e-9)
    if events == 0:
        assert now.none_within(2.0) <= now.none_within(1.0) <= 1.0
    both = together([now, now])
    assert both.mean == pytest.approx(2 * now.mean) and both.variance == pytest.approx(2 * now.variance)


@settings(max_examples=60)
@given(
    st.sampled_from([kind for kind in TABLE if kind.takes_ranks]), st.integers(1, 16), st.integers(0, 4), times, st.floats(1.0, 4.0),
    st.sampled_from(["heartbeat_s", "node_s", "quiesce_s", "progress_s"]),
)  # fmt: skip
def test_costs_rise_with_time_outs_and_with_what_was_measured(
    kind: object, world: int, spares: int, start_s: float, factor: float, name: str
) -> None:
    terms = Terms.of(RunSettings(world=world, spares=spares, shards=64))
    longer = dataclasses.replace(terms, timeouts={**terms.timeouts, name: factor * terms.timeouts[name]})
    impact = FaultImpact(kind=kind.name, lost=1, in_view=1, spares=spares)  # type: ignore[attr-defined]
    now, then = fault_cost(impact, terms, RecoveryTimes.of(start_s)), fault_cost(impact, longer, RecoveryTimes.of(start_s))
    assert now.lost_s <= then.lost_s and now.charged_s <= then.charged_s
    slower = fault_cost(impact, terms, RecoveryTimes.of(factor * start_s))
    assert now.lost_s <= slower.lost_s and now.charged_s <= slower.charged_s
    bare = fault_cost(dataclasses.replace(impact, spares=0), terms, RecoveryTimes.of(start_s))
    assert now.lost_s <= bare.lost_s and now.charged_s == bare.charged_s
    early = fault_cost(dataclasses.replace(impact, training_s=0.1, run_s=0.2), terms, RecoveryTimes.of(start_s))
    assert early.lost_s <= now.lost_s and early.charged_s <= now.charged_s


@settings(max_examples=60)
@given(st.floats(1e-7, 0.1), st.integers(0, 50), st.floats(1.0, 1e5), st.floats(0.1, 100.0), st.integers(1, 64))
def test_a_goodput_lies_within_its_interval_and_faults_lower_it(
    rate_per_s: float, events: int, exposure_s: float, cost_s: float, world: int
) -> None:
    prices = {"kill_rank": Price(cost_s)}
    found, worse = (
        coming({"kill_rank": prior(rate_per_s).after(count, exposure_s)}, prices, exposure_s, world, 0.01) for count in (events, events + 5)
    )
    for each in (found, worse):
        assert 0 <= each.low <= each.high <= 0.99
    assert worse.mean <= found.mean + 1e-9
