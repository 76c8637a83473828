"""The interval of an expectation holds what it says: about 95% of what random costs come to, however many there are and how unequal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gamma

from fleet.ledger.expectation import COVERS, MACHINES, Terms, interval
from fleet.protocol.types import Fault
from fleet.settings.run import RunSettings

RUNS = 20_000
costs = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30)


def drawn(means: list[float], seed: int) -> np.ndarray:
    """What each of many runs loses: exponential costs, times how slow its machine is."""
    rng = np.random.Generator(np.random.PCG64(seed))
    spread = math.log(1 + MACHINES**2)
    machines = rng.lognormal(-spread / 2, math.sqrt(spread), RUNS)
    return machines * (rng.exponential(1.0, (RUNS, len(means))) @ np.array(means))


@settings(max_examples=40, deadline=None)
@given(costs, st.integers(0, 2**32))
def test_the_interval_covers_what_it_says(means: list[float], seed: int) -> None:
    low, high = interval(means)
    lost = drawn(means, seed)
    covered = float(np.mean((low <= lost) & (lost <= high)))
    assert COVERS - 0.02 <= covered <= 0.98, "a little more where costs are few: none is less than 0"


@settings(max_examples=40, deadline=None)
@given(costs)
def test_its_quantiles_are_nearly_those_of_the_gamma_law(means: list[float]) -> None:
    mean, squares = sum(means), sum(cost**2 for cost in means)
    variance = (1 + MACHINES**2) * squares + (MACHINES * mean) ** 2
    law = gamma(mean**2 / variance, scale=variance / mean)
    assert interval(means) == pytest.approx((law.ppf(0.025), law.ppf(0.975)), abs=0.06 * mean)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.0, 500.0), max_size=40), st.integers(1, 8), st.integers(0, 2), st.floats(30.0, 600.0))
def test_the_expectation_lies_within_its_interval_and_faults_lower_it(
    at_s: list[float], world: int, spares: int, training_s: float
) -> None:
    terms = Terms.of(RunSettings(world=world, spares=spares), 30.0)
    faults = [Fault(f"f{number}", at, "gpu", "kill_rank", slot=0) for number, at in enumerate(at_s)]
    quiet, stormy = terms.expectation((), training_s, 100), terms.expectation(faults, training_s, 100)
    assert quiet is not None and stormy is not None
    for each in (quiet, stormy):
        assert 0 <= each.low <= each.goodput <= each.high <= 1
    assert stormy.goodput <= quiet.goodput and stormy.low <= quiet.low
