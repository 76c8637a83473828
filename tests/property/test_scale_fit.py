"""The law is found again from visits that were made from it, and intervals hold what they say, as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.laws.scale_fit import SHAPES, Visit, evened, fit

TRUE = {
    "compute": 0.8, "update": 0.02, "data": 0.05, "exchange_alone": 0.01, "exchange_volume": 0.03, "exchange_peers": 0.004, "wait": 0.01,
    "verify": 0.002,
}  # fmt: skip
SHARDS = 16
SEEDS = 300


def expected(world: int, law: dict[str, float]) -> dict[str, float]:
    """Terms without noise, of the rank that has most shards."""
    return {name: sum(law[each] * shape(world, SHARDS) for each, shape in shapes.items()) for name, shapes in SHAPES.items()}


def visit(world: int, random: np.random.Generator, deviation: float) -> Visit:
    """Terms that deviate together, as a busy host makes all of them longer, and each alone. Both in proportion to the step."""
    terms = expected(world, TRUE)
    step_s, together = sum(terms.values()), random.normal() * deviation
    alone = {name: random.normal() * 0.3 * deviation if name in ("compute", "exchange", "wait") else 0.0 for name in terms}
    return Visit(world, {name: value * (1 + together) + step_s * alone[name] for name, value in terms.items()})


@given(st.fixed_dictionaries({name: st.floats(1e-4, 10.0) for name in TRUE}))
def test_without_noise_the_law_is_found_again(law: dict[str, float]) -> None:
    found = fit([Visit(world, expected(world, law)) for world in (1, 2, 4, 8)], SHARDS)
    assert {name: each.value for name, each in found.coefficients().items()} == pytest.approx(law, rel=1e-6)
    step = found.step_s(16)
    assert step.value == pytest.approx(sum(expected(16, law).values()), rel=1e-6) and step.high - step.low < 1e-4 * step.value


@pytest.mark.parametrize("deviation", [0.01, 0.03])
@pytest.mark.parametrize(("worlds", "rounds", "held_out"), [((1, 2, 4), 2, 8), ((1, 2, 4), 3, 8), ((1, 2, 4, 8), 3, 16)])
def test_the_interval_of_the_held_out_world_holds_it_as_often_as_it_says(
    worlds: tuple[int, ...], rounds: int, held_out: int, deviation: float
) -> None:
    inside = 0
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        law = fit([visit(world, random, deviation) for _ in range(rounds) for world in worlds], SHARDS)
        taken_s = np.mean([visit(held_out, random, deviation).step_s for _ in range(rounds)])
        inside += law.step_s(held_out, rounds).holds(float(taken_s))
    assert 0.85 <= inside / SEEDS <= 0.95


def test_intervals_of_coefficients_hold_the_true_ones_and_those_of_steps_widen() -> None:
    inside = dict.fromkeys(TRUE, 0)
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        law = fit([visit(world, random, 0.02) for _ in range(3) for world in (1, 2, 4, 8)], SHARDS)
        for name, each in law.coefficients().items():
            inside[name] += each.holds(TRUE[name])
        steps = [law.step_s(world, 3) for world in (8, 16, 32, 64)]
        wide = [step.high - step.low for step in steps]
        assert wide[1] < wide[2] < wide[3] and all(step.low <= step.value <= step.high for step in steps)
    assert all(0.8 <= inside[name] / SEEDS for name in ("compute", "exchange_volume", "wait")), inside


@given(st.integers(1, 16), st.integers(16, 64))
def test_waiting_for_the_rank_with_most_shards_is_no_noise(world: int, shards: int) -> None:
    before = Visit(world, dict.fromkeys(SHAPES, 1.0))
    after = evened(before, shards)
    assert after.step_s == pytest.approx(before.step_s)
    assert after.terms["compute"] == pytest.approx(-(-shards // world) * world / shards)


def test_a_coefficient_is_never_below_nothing() -> None:
    for seed in range(50):
        random = np.random.default_rng(seed)
        law = fit([visit(world, random, 0.2) for _ in range(2) for world in (1, 2, 4)], SHARDS)
        assert all(each.value >= 0 and each.low >= 0 for each in law.coefficients().values())
