"""The reliability laws at their limits, and against simulations. Published figures: ``test_laws_figures.py``."""

from __future__ import annotations

import pytest
from scipy.stats import poisson

from fleet.laws import reliability as laws
from fleet.simulation.rng import stream


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


def test_redundancy_without_repair_is_a_harmonic_sum() -> None:
    assert laws.redundant_mttf_s(60.0, parts=3, needed=1) == pytest.approx(60 * (1 + 1 / 2 + 1 / 3))
    assert laws.redundant_mttf_s(60.0, parts=3, needed=3) == pytest.approx(20.0)


def test_redundancy_with_repair_agrees_with_the_closed_form_of_two_parts() -> None:
    """(3 lambda + mu) / (2 lambda^2)."""
    rate, repair = 1 / 1000.0, 1 / 10.0
    assert laws.redundant_mttf_s(1000.0, parts=2, needed=1, repair_s=10.0) == pytest.approx((3 * rate + repair) / (2 * rate**2))


def test_a_shock_of_every_unit_is_a_rate_of_its_own() -> None:
    assert laws.shock_mtbf_s(100.0, 10, ()) == pytest.approx(10.0)
    assert laws.shock_mtbf_s(100.0, 10, ((10, 10.0),)) == pytest.approx(5.0)


def test_the_cascade_divides_at_every_level() -> None:
    cascade = laws.mtbf_cascade_s(4096.0, nodes_per_rack=4, gpus_per_node=8, gpus=64)
    assert cascade == {"node": 4096.0, "rack": 1024.0, "fleet": 512.0}


@pytest.mark.parametrize("mean", [0.3, 7.0, 47.5, 900.0, 5e4])
@pytest.mark.parametrize("probability", [0.5, 0.99, 0.999999])
def test_poisson_quantile_agrees_with_scipy(mean: float, probability: float) -> None:
    assert laws.poisson_quantile(mean, probability) == poisson.ppf(probability, mean)
