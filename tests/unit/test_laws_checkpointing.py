"""The checkpoint laws at their limits, and against numerical optima. Published figures: ``test_laws_figures.py``."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from fleet.errors import ConfigError
from fleet.laws import checkpointing as laws
from fleet.simulation.rng import stream


@pytest.mark.parametrize("z", [-0.3678794411714, -0.3678, -0.36, -0.2, -1e-9, 0.0, 1e-9, 0.2, 0.25, 1.0, math.e, 50.0, 1e6, 1e200])
def test_lambert_w0_agrees_with_scipy(z: float) -> None:
    assert laws.lambert_w0(z) == pytest.approx(lambertw(z).real, rel=1e-7 if z < -0.3678 else 1e-12, abs=1e-300)


def test_lambert_w0_at_its_branch_point() -> None:
    assert laws.lambert_w0(-1 / math.e) == pytest.approx(-1.0, abs=1e-7)


def test_lambert_w0_refuses_what_has_no_real_value() -> None:
    with pytest.raises(ConfigError, match="-0.5"):
        laws.lambert_w0(-0.5)


@pytest.mark.parametrize(("blocked", "mtbf"), [(1e-3, 1e4), (0.05, 15.0), (60.0, 3600.0), (300.0, 900.0), (10.0, 4.0)])
def test_exact_optimum_is_where_goodput_is_greatest(blocked: float, mtbf: float) -> None:
    found = minimize_scalar(lambda w: -laws.goodput(w, blocked, mtbf, 3.0, 2.0), bounds=(1e-9, 3 * mtbf), options={"xatol": 1e-9 * mtbf})
    work = laws.exact_work_s(blocked, mtbf)
    assert laws.goodput(work, blocked, mtbf, 3.0, 2.0) >= -found.fun * (1 - 1e-12)


@pytest.mark.parametrize("ratio", [1e-14, 1e-10, 4.9e-7, 5.1e-7, 1e-4])
def test_exact_optimum_solves_its_equation_far_below_the_mtbf(ratio: float) -> None:
    u = laws.exact_work_s(ratio, 1.0)
    series = sum(u**n / n for n in range(2, 12))  # -log(1 - u) - u = C/M, without the cancellation
    assert series == pytest.approx(ratio, rel=1e-9)


def test_daly_beyond_twice_the_mtbf_is_the_mtbf() -> None:
    assert laws.daly_work_s(30.0, 15.0) == 15.0


def test_restart_that_cannot_fail_is_cheaper() -> None:
    assert laws.segment_safe_restart_s(10, 1, 18, 5, 5) < laws.segment_s(10, 1, 18, 5, 5)
    assert laws.segment_safe_restart_s(10, 1, 18, 5, 0) == pytest.approx(laws.segment_s(10, 1, 18, 5, 0))


@pytest.mark.parametrize(("down", "restart"), [(0.0, 0.0), (300.0, 0.0), (0.0, 300.0), (200.0, 400.0)])
def test_the_breakdown_agrees_with_a_simulation(down: float, restart: float) -> None:
    """One segment after another, failures drawn one by one: an independent program for the same sentence."""
    random, mtbf, work, blocked = stream(3, "breakdown"), 1500.0, 400.0, 60.0
    spent = dict.fromkeys(("work", "checkpoint", "rework", "restart", "down"), 0.0)
    for _ in range(40_000):
        while (life := random.expovariate(1 / mtbf)) < work + blocked:
            spent["rework"] += life
            spent["down"] += down
            while (life := random.expovariate(1 / mtbf)) < restart:
                spent["restart"] += life
                spent["down"] += down
            spent["restart"] += restart
        spent["work"] += work
        spent["checkpoint"] += blocked
    exact = laws.breakdown(work, blocked, mtbf, down, restart)
    total = sum(spent.values())
    assert sum(getattr(exact, name) for name in spent) == pytest.approx(1.0, abs=1e-12)
    for name, seconds in spent.items():
        assert getattr(exact, name) == pytest.approx(seconds / total, abs=0.004), name


def test_a_goodput_that_no_number_can_hold_is_zero_and_a_time_is_refused() -> None:
    assert laws.goodput(1e6, 0.0, 1.0) == 0.0
    with pytest.raises(ConfigError, match="segment_s"):
        laws.segment_s(1e6, 0.0, 1.0)
