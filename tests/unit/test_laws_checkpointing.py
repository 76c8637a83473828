"""Published check values of the checkpoint laws. Tolerances are the digits that were published."""

from __future__ import annotations

import math

import pytest
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from fleet.laws import checkpointing as laws

MIN, HOUR = 60.0, 3600.0


@pytest.mark.parametrize("z", [-0.3678794411714, -0.3678, -0.36, -0.2, -1e-9, 0.0, 1e-9, 0.2, 0.25, 1.0, math.e, 50.0, 1e6, 1e200])
def test_lambert_w0_agrees_with_scipy(z: float) -> None:
    assert laws.lambert_w0(z) == pytest.approx(lambertw(z).real, rel=1e-7 if z < -0.3678 else 1e-12, abs=1e-300)


def test_lambert_w0_at_its_branch_point() -> None:
    assert laws.lambert_w0(-1 / math.e) == pytest.approx(-1.0, abs=1e-7)


def test_lambert_w0_refuses_what_has_no_real_value() -> None:
    with pytest.raises(ValueError, match="-0.5"):
        laws.lambert_w0(-0.5)


@pytest.mark.parametrize(("mtbf", "daly", "exact"), [(24 * HOUR, 116.7, 116.7), (6 * HOUR, 56.7, 56.7), (15 * MIN, 9.14, 9.17)])
def test_optimum_for_a_five_minute_checkpoint(mtbf: float, daly: float, exact: float) -> None:
    digits = 2 if mtbf == 15 * MIN else 1
    assert round(laws.daly_work_s(5 * MIN, mtbf) / MIN, digits) == daly
    assert round(laws.exact_work_s(5 * MIN, mtbf) / MIN, digits) == exact


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


def test_first_order_is_not_enough() -> None:
    assert laws.goodput(10, 1, 18, 5, 5) == pytest.approx(0.391, abs=5e-4)
    assert laws.goodput_first_order(10, 1, 18, 5, 5) == pytest.approx(0.126, abs=5e-4)


def test_restart_that_cannot_fail_is_cheaper() -> None:
    assert laws.segment_safe_restart_s(10, 1, 18, 5, 5) < laws.segment_s(10, 1, 18, 5, 5)
    assert laws.segment_safe_restart_s(10, 1, 18, 5, 0) == pytest.approx(laws.segment_s(10, 1, 18, 5, 0))


@pytest.mark.parametrize(
    ("nodes", "per_node_day", "blocked", "work", "expected"),
    [
        (2000, 6.5e-3, 0, 60 * MIN, 0.684),
        (2000, 6.5e-3, 0, 5 * MIN, 0.932),
        (2048, 6.5e-3, 10, None, 0.901),
        (2048, 6.5e-3, 60, None, 0.829),
    ],
)
def test_effective_training_time_ratio(nodes: int, per_node_day: float, blocked: float, work: float | None, expected: float) -> None:
    mtbf = 86_400 / (nodes * per_node_day)
    interval = laws.young_work_s(blocked, mtbf) if work is None else work
    assert laws.ettr(interval, blocked, mtbf, 5 * MIN) == pytest.approx(expected, abs=5e-4)


def test_young_interval_of_the_ettr_row() -> None:
    assert round(laws.young_work_s(10, 86_400 / (2048 * 6.5e-3))) == 360


@pytest.mark.parametrize(("gpus", "hours"), [(8, 12.0), (32, 6.0), (64, 4.2), (128, 3.0), (256, 2.1), (512, 1.5), (1024, 1.1)])
def test_young_sweep(gpus: int, hours: float) -> None:
    assert round(laws.young_work_s(60.0, 4285.714 * HOUR / (gpus / 8)) / HOUR, 1) == hours


@pytest.mark.parametrize(
    ("parameters", "gigabytes", "seconds"), [(7e9, 98, 0.98), (70e9, 980, 9.8), (175e9, 2450, 24.5), (1e12, 14_000, 140)]
)
def test_checkpoint_size_and_write(parameters: float, gigabytes: float, seconds: float) -> None:
    size = laws.state_bytes(parameters)
    assert size == pytest.approx(gigabytes * 1e9)
    assert laws.write_s(size, 100e9) == pytest.approx(seconds)


def test_training_state_needs_that_many_gpus() -> None:
    assert laws.state_bytes(1e12, 16) == 16e12
    assert laws.least_gpus(16e12, 80e9) == 200
    assert laws.state_bytes(175e9, 16) == pytest.approx(2.8e12)


def test_llama_70b_checkpoint() -> None:
    size = laws.state_bytes(70.6e9)
    assert round(size / 1e9, 1) == 988.4
    assert round(laws.write_s(size, 7e9), 1) == 141.2
    assert round(100 * laws.write_s(size, 7e9) / HOUR, 2) == 3.92


@pytest.mark.parametrize(("gpus", "hours"), [(64, 9.5), (256, 19.0), (512, 26.9), (1024, 38.1)])
def test_checkpoint_loss_as_published_and_consistent(gpus: int, hours: float) -> None:
    mtbf, month = 4285.714 * HOUR / (gpus / 8), 30 * 24 * HOUR
    mixed = laws.lost_s(month, laws.young_work_s(60.0, mtbf), 141.2, mtbf)
    consistent = laws.lost_s(month, laws.young_work_s(141.2, mtbf), 141.2, mtbf)
    assert round(mixed / HOUR, 1) == hours
    assert consistent < mixed, "an interval chosen for the write that is paid must lose less"
