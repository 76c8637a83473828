"""Gradients of sharded parameters that ranks have added up before a loss count behind it: a loss costs the lost rank's shards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import fleet.simulation.contributing as contributing_module
from fleet.protocol.chunks import Readiness
from fleet.protocol.records import ProcessLost
from fleet.simulation.contributing import SimContributions
from fleet.simulation.gathering import SimFsdpLayout
from fleet.simulation.plan import Plan, Trouble, flipped_plan, small
from fleet.simulation.steps import SimStep
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, rollbacks, simulate, simulate_seed

Patch = pytest.MonkeyPatch
MOST = 200
STEP, EACH = 5, 4


def computed(patch: Patch, seed: int, copies: int, point: str = "compute", **changes: Any) -> tuple[Outcome, Counter[int], Counter[int]]:
    """(a run in which slot 1 is killed in step 5, how often each shard of that step was computed, the same of the ranks that stay)."""
    found, of_others = Counter[int](), Counter[int]()
    right = SimFsdpLayout.contribute

    def contribute(self: SimFsdpLayout, shard: int, value: int, right_one: int) -> None:
        at = self.kept.at
        if at is not None and at.step == STEP:
            found[shard] += 1
            of_others[shard] += self.rank.protocol.slot != 1
        right(self, shard, value, right_one)

    settings = dataclasses.replace(small(4, nodes=4), optimizer_sharding="fsdp", optimizer_copies=copies, shards=4 * EACH)
    plan = Plan(seed=seed, settings=settings, steps=8, capacity=4, save_every_s=0.3, **changes)
    with patch.context() as noted:
        noted.setattr(SimFsdpLayout, "contribute", contribute)
        outcome = completed(plan, Trouble(kind="kill", point=point, step=STEP, slot=1, after=1))
    return outcome, found, of_others


@pytest.mark.parametrize("copies", [1, 2])
def test_a_loss_costs_the_shards_of_the_lost_rank(copies: int, monkeypatch: Patch) -> None:
    for seed in range(12):
        outcome, found, of_others = computed(monkeypatch, seed, copies)
        lost = [record.member.slot for record in outcome.world.journal if isinstance(record, ProcessLost)]
        assert lost == [1] and rollbacks(outcome) == 0
        assert sorted(found) == list(range(4 * EACH))
        assert sum(of_others.values()) <= 4 * EACH, f"seed {seed}: the others computed {of_others}"


def test_without_a_copy_on_the_way_the_step_is_computed_anew(monkeypatch: Patch) -> None:
    """The control of the test above."""
    right = SimContributions.place

    def wrong(self: SimContributions, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self.adders.each = 1
        self.adders.turn_to(self.adders.cut)

    monkeypatch.setattr(SimContributions, "place", wrong)
    more = [sum(computed(monkeypatch, seed, 1)[2].values()) for seed in range(12)]
    assert sum(many > 4 * EACH for many in more) >= 10


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def claims_what_is_not_there(patch: Patch) -> None:
    patch.setattr(SimContributions, "there", property(lambda self: range(self.rank.world.settings.shards)))


def takes_what_comes_before_all_know_what_counts(patch: Patch) -> None:
    right = SimContributions.place

    def wrong(self: SimContributions, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self.adders.agreed = True

    patch.setattr(SimContributions, "place", wrong)


def takes_what_is_of_another_attempt(patch: Patch) -> None:
    right = contributing_module.can_accept

    def wrong(*arguments: Any, **named: Any) -> Readiness:
        found = right(*arguments, **named)
        return Readiness.NOW if found is Readiness.NEVER else found

    patch.setattr(contributing_module, "can_accept", wrong)


def keeps_what_ranks_that_differ_have_sent(patch: Patch) -> None:
    patch.setattr(SimStep, "_there", lambda self: self.layout.there)


def with_flips(seed: int) -> Outcome:
    """Bits flip in chunks, parameters among them."""
    plan = flipped_plan(seed, sharded=True)
    return simulate(dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, optimizer_sharding="fsdp")))


def test_bits_that_flip_reach_no_sum() -> None:
    assert not [outcome.report() for seed in range(40) if (outcome := with_flips(seed)).broken]


MUTATIONS: dict[Callable[[Patch], None], Callable[[int], Outcome]] = {
    claims_what_is_not_there: partial(simulate_seed, "gathers"),
    takes_what_comes_before_all_know_what_counts: partial(simulate_seed, "gathers"),
    takes_what_is_of_another_attempt: partial(simulate_seed, "gathers"),
    keeps_what_ranks_that_differ_have_sent: with_flips,
}


@pytest.mark.parametrize(("mutation", "run"), MUTATIONS.items(), ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], run: Callable[[int], Outcome], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    found = next((broken for seed in range(MOST) if (broken := run(seed).broken)), "")
    assert found in ("sums", "repeat"), f"{mutation.__name__}: {found or 'nothing'} was broken first, in up to {MOST} runs"
