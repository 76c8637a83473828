"""Published check values of the reliability laws."""

from __future__ import annotations

import pytest

from fleet.laws import reliability as laws
from fleet.rng import stream

HOUR, DAY = 3600.0, 86_400.0
NODE = [(50_000.0, 8), (150_000.0, 8), (100_000.0, 2)]


@pytest.mark.parametrize(
    ("gpus", "hours", "places", "percent", "within"),
    [
        (256, 195.3, 1, 11.6, 0.05),
        (2048, 24.4, 1, 62.6, 0.05),
        (8192, 6.1, 1, 98.04, 0.02),
        (100_000, 0.50, 2, 100.0, 0.05),
        (25_000, 2.0, 1, 100.0, 0.05),
    ],
)
def test_mtbf_and_probability_of_a_failure_in_a_day(gpus: int, hours: float, places: int, percent: float, within: float) -> None:
    mtbf = laws.mtbf_s(50_000 * HOUR, gpus)
    assert round(mtbf / HOUR, places) == hours
    assert 100 * laws.failure_probability(DAY, mtbf) == pytest.approx(percent, abs=within)


def test_failures_of_25k_gpus() -> None:
    mtbf = laws.mtbf_s(50_000 * HOUR, 25_000)
    assert laws.expected_failures(DAY, mtbf) == pytest.approx(12)
    assert laws.expected_failures(365 * DAY, mtbf) == pytest.approx(4380)


@pytest.mark.parametrize(
    ("reliability", "nodes", "percent", "digits"), [(0.999, 1000, 36.8, 1), (0.999, 10_000, 0.0045, 4), (0.9999, 10_000, 36.8, 1)]
)
def test_reliability_gap(reliability: float, nodes: int, percent: float, digits: int) -> None:
    assert round(100 * laws.all_survive(reliability, nodes), digits) == percent


def test_node_in_series() -> None:
    assert round(laws.series_mttf_s(NODE), 1) == 4285.7
    assert round(laws.series_mttf_s(NODE[:2]), 1) == 4687.5


@pytest.mark.parametrize(
    ("gpus", "hours", "failures"),
    [(8, 4285.7, 0.2), (32, 1071.4, 0.7), (64, 535.7, 1.3), (128, 267.9, 2.7), (256, 133.9, 5.4), (512, 67.0, 10.8), (1024, 33.5, 21.5)],
)
def test_node_sweep(gpus: int, hours: float, failures: float) -> None:
    mtbf = laws.mtbf_s(laws.series_mttf_s(NODE) * HOUR, gpus / 8)
    assert round(mtbf / HOUR, 1) == hours
    assert round(laws.expected_failures(30 * DAY, mtbf), 1) == failures


def test_llama3() -> None:
    assert round(54 * 24 / 419, 1) == 3.1
    assert 1000 * laws.rate_per_unit_day(419, 16_384 / 8, 54 * DAY) == pytest.approx(3.79, abs=5e-3)
    assert round(24 / laws.rate_per_unit_day(419, 16_384, 54 * DAY)) == 50_677
    assert laws.poisson_halfwidth(419) == pytest.approx(40, abs=0.5)


def test_failures_per_thousand_node_days() -> None:
    assert laws.mtbf_s(DAY / 6.5e-3, 16_384 / 8) / HOUR == pytest.approx(1.8, abs=0.05)
    assert laws.mtbf_s(DAY / 6.5e-3, 131_072 / 8) / HOUR == pytest.approx(0.23, abs=0.005)


def test_recovery_tail_and_straggler() -> None:
    assert round(100 * laws.recovery_share(20 * 60, 2 * HOUR), 1) == 16.7
    assert round(100 * laws.any_slow(0.01, 100), 1) == 63.4
    assert laws.straggler_loss(0.8) == pytest.approx(0.2)
    assert 1 - laws.recovery_share(10, 18) == pytest.approx(0.44, abs=0.005)


def test_nodes_in_repair() -> None:
    a_day = laws.mean_down(12_500, 3.8e-3 / DAY, 24 * HOUR)
    assert a_day == pytest.approx(47.5)
    assert laws.poisson_quantile(a_day, 0.999) == 70
    assert laws.poisson_quantile(3 * a_day, 0.999) == 181


def test_weibull() -> None:
    scale = laws.weibull_scale_s(100.0, 0.7)
    assert laws.weibull_hazard_per_s(10, scale, 0.7) > laws.weibull_hazard_per_s(100, scale, 0.7)
    assert laws.weibull_scale_s(100.0, 1.0) == 100.0
    assert laws.weibull_survival(scale, scale, 0.7) == pytest.approx(0.36788, abs=1e-5)
    assert laws.renew_all_mtbf_s(scale, 0.7, 1000) < 0.1 * laws.mtbf_s(100.0, 1000), "renewing all parts is far too pessimistic"


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_all_groups_down_at_once_agrees_with_a_simulation(groups: int) -> None:
    rate, repair, horizon = 1.0, 1.0, 40_000.0
    random = stream(11, "all-lost", groups)
    next_s = [random.expovariate(rate / groups) for _ in range(groups)]
    up, now, falls = [True] * groups, 0.0, 0
    while now < horizon:
        unit = min(range(groups), key=next_s.__getitem__)
        now = next_s[unit]
        up[unit] = not up[unit]
        falls += not any(up)
        next_s[unit] = now + random.expovariate(rate / groups if up[unit] else 1 / repair)
    expected = laws.all_lost_rate_per_s(rate, groups, repair) * horizon
    assert falls == pytest.approx(expected, rel=0.05)
