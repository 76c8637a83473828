"""Limits of losses and gradients: what is judged, and when nothing is."""

from __future__ import annotations

import math
import random

import pytest

from actors.rank.step.jumps import KEPT, LEAST, Jumps, judged
from fleet.errors import ConfigError
from fleet.protocol.vote import Doubt
from fleet.settings.run import VerifySettings


def taught(values: list[float], spreads: float = 10.0) -> Jumps:
    jumps = Jumps(spreads)
    for value in values:
        jumps.seen(value, 2 * value)
    return jumps


def test_nothing_is_judged_before_enough_was_seen() -> None:
    assert taught([1.0] * (LEAST - 1)).limits() == [math.inf, math.inf]
    assert taught([1.0] * LEAST).limits() == [pytest.approx(2.0), pytest.approx(4.0)]  # ten times a tenth above the median


def test_a_loss_that_falls_and_wavers_is_never_too_large() -> None:
    draw, jumps = random.Random(1), Jumps(10.0)
    for step in range(2_000):
        loss = 8 * math.exp(-step / 300) + 2 + draw.gauss(0, 0.3)
        assert loss < jumps.limits()[0]
        jumps.seen(loss, abs(draw.gauss(1, 0.3)))


def test_the_last_steps_count() -> None:
    jumps = taught([10.0] * KEPT + [1.0] * KEPT)
    assert jumps.limits()[0] == pytest.approx(2.0)


def test_after_a_jump_that_was_real_a_while_nothing_is_judged() -> None:
    jumps = taught([1.0] * KEPT)
    jumps.accept()
    for _ in range(LEAST):
        assert jumps.limits() == [math.inf, math.inf]
        jumps.seen(5.0, 10.0)
    assert jumps.limits()[0] < math.inf


def test_another_history_is_judged_by_itself() -> None:
    jumps = taught([1.0] * KEPT)
    jumps.begin()
    assert jumps.limits() == [math.inf, math.inf]


def test_a_norm_that_is_not_known_forbids_nothing() -> None:
    jumps = Jumps(10.0)
    for _ in range(LEAST):
        jumps.seen(1.0, math.nan)
    assert jumps.limits() == [pytest.approx(2.0), math.inf]


def test_off_sends_nothing() -> None:
    jumps = taught([1.0] * KEPT, spreads=0.0)
    assert jumps.limits() == []
    assert jumps.width == 0


@pytest.mark.parametrize(
    ("losses", "counted", "expected"),
    [
        ([1.0, 2.0], [True, True], None),
        ([1.0, math.inf, math.nan], [True, True, True], Doubt(1, "its loss is inf", True)),
        ([1.0, math.nan, 5.0], [True, False, True], Doubt(2, "its loss is 5, and up to 3 is usual", False)),
        ([1.0, 3.0], [True, True], None),
        ([9.0, 1.0], [False, True], None),
        ([9.0], [False], None),
    ],
)
def test_the_first_loss_that_is_not_finite_is_named_or_the_largest_that_is_not_usual(
    losses: list[float], counted: list[bool], expected: Doubt | None
) -> None:
    largest, doubt = judged(losses, counted, 3.0)
    assert doubt == expected
    assert doubt is not None or largest == max((loss for loss, counts in zip(losses, counted, strict=True) if counts), default=0.0)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_an_impossible_number_of_spreads_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="verify.jumps"):
        VerifySettings(jumps=value)
