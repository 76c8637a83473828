"""Thousands of simulated runs, each a different mix of size, network and troubles: every invariant holds in all of them."""

from __future__ import annotations

import os

import pytest

from fleet.simulation.world import Outcome
from tests.simulation.runs import COMMAND, in_parts, simulate_seed

SEEDS = int(os.environ.get("FLEET_SEEDS", "2000"))

REGRESSIONS = {
    52: "a journal that lost its end: a generation was published twice, as two views",
    448: "the coordinator died between the loss that exceeded a budget and its verdict, and nobody gave it again",
    768: "a silent node was given up in the middle of being given up",
    278: "a rank was called out in the very moment in which it stepped aside, and had no view any more",
    1024: "a sum in which a newcomer had taken part early was used though the state it was for had not come",
    1144: "a rank that was fenced asked for ever whether what is done once was done",
    3655: "a loop that hung had to receive, never sat down, and its listening thread answered for it again and again",
    5864: "the same, by another way",
    8379: "a view was to grow while its own members were not fully known after a restart",
}
"""Seeds that broke something once, and what it was."""


def failed(seeds: range) -> list[str]:
    outcomes: list[Outcome] = [simulate_seed(seed) for seed in seeds]
    return [outcome.report(COMMAND) for outcome in outcomes if outcome.broken]


def test_every_invariant_holds_in_every_seed() -> None:
    reports = in_parts(failed, SEEDS)
    assert not reports, "\n\n".join(reports[:3])


@pytest.mark.parametrize("seed", REGRESSIONS, ids=[str(seed) for seed in REGRESSIONS])
def test_a_seed_that_once_failed(seed: int) -> None:
    outcome = simulate_seed(seed)
    assert not outcome.broken, outcome.report(COMMAND)


def test_a_seed_is_repeated_exactly() -> None:
    first, second = simulate_seed(11, keep_trace=True), simulate_seed(11, keep_trace=True)
    assert len(first.trace) > 40
    assert first.trace == second.trace


def test_a_failure_names_seed_invariant_and_command() -> None:
    outcome = simulate_seed(3)
    report = Outcome(3, outcome.status, outcome.reason, "donor", "the donor is dirty", outcome.trace, outcome.world).report(COMMAND)
    assert report.startswith("seed 3: invariant 'donor' does not hold: the donor is dirty")
    assert report.endswith("repeat with: python -m tests.simulation --seed 3 --trace")
    assert len(outcome.trace) == 30
