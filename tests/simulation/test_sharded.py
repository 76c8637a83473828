"""Ranks with sharded optimizer state: every invariant holds through random troubles, and what breaks the commit's two phases is caught.

The vote between them has mutations of its own, in ``test_votes.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from fleet.protocol import chunks as chunks_module
from fleet.protocol.chunks import Claim
from fleet.protocol.records import CheckpointRecord, ViewPublished
from fleet.protocol.types import StateId
from fleet.protocol.vote import CommitVote
from fleet.simulation import sharded as sharded_module
from fleet.simulation.plan import Plan, Trouble, small
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, rollbacks, simulate_seed

Patch = pytest.MonkeyPatch
MOST = 60


def run(*troubles: Trouble, world: int = 4, nodes: int = 2, seed: int = 1) -> Outcome:
    settings = dataclasses.replace(small(world, nodes=nodes), optimizer_sharding="zero1")
    return completed(Plan(seed=seed, settings=settings, steps=12, capacity=4), *troubles)


@pytest.mark.parametrize("point", ["reducing", "ready", "decided", "mutating", "gathering", "committed"])
def test_one_rank_lost_anywhere_in_a_step_costs_no_state(point: str) -> None:
    outcome = run(Trouble(kind="kill", point=point, step=5, slot=1))
    assert rollbacks(outcome) == 0
    assert sum(isinstance(record, ViewPublished) for record in outcome.world.journal) >= 2


@pytest.mark.parametrize("point", ["advancing", "placed", "slices"])
def test_one_more_lost_while_chunks_move_costs_none_either(point: str) -> None:
    """Nodes of two ranks: the second loss comes in the view after the first, when one copy of each chunk is left or has moved on."""
    first = Trouble(kind="kill", point="ready" if point == "advancing" else "compute", step=5, slot=1)
    outcome = run(first, world=4) if point == "advancing" else run(first, Trouble(kind="kill", point=point, step=5, slot=0))
    assert rollbacks(outcome) in (0, 1)


def within_commit(seed: int) -> Outcome:
    """Whoever is first to know that all have their sums is killed: others know it too, or have stepped, or find their group broken."""
    return run(Trouble(kind="kill", point="decided", step=4), seed=seed)


def test_whoever_is_ready_follows_those_who_have_stepped() -> None:
    outcomes = [within_commit(seed) for seed in range(MOST)]
    assert not any(map(rollbacks, outcomes))
    assert any("AT advancing" in line for outcome in outcomes for line in outcome.trace), "nobody was left behind in any of the runs"


def test_all_copies_lost_goes_back_to_the_newest_checkpoint() -> None:
    outcome = run(Trouble(kind="kill", point="compute", step=8, slots=(0, 1, 2)))
    assert rollbacks(outcome) == 1
    assert any(isinstance(record, CheckpointRecord) for record in outcome.world.journal)


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def nobody_keeps_a_copy(patch: Patch) -> None:
    patch.setattr(sharded_module, "guards", lambda nodes, *others: tuple(() for _ in nodes))


def who_is_ready_does_not_follow(patch: Patch) -> None:
    right = chunks_module.settled

    def wrong(claims: Sequence[Claim], target: StateId) -> list[Claim]:
        return right([dataclasses.replace(claim, ready=False) for claim in claims], target)

    patch.setattr(CommitVote, "follow", lambda self, claims, me, target: False)
    patch.setattr(sharded_module, "settled", wrong)


def chunks_of_another_step_count(patch: Patch) -> None:
    right = chunks_module.settled

    def wrong(claims: Sequence[Claim], target: StateId) -> list[Claim]:
        return [
            dataclasses.replace(claim, state=target, complete=False) if claim.state is not None else settled
            for claim, settled in zip(claims, right(claims, target), strict=True)
        ]

    patch.setattr(sharded_module, "settled", wrong)


MUTATIONS = (nobody_keeps_a_copy, who_is_ready_does_not_follow, chunks_of_another_step_count)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.__name__ for mutation in MUTATIONS])
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """An invariant breaks, or a single loss costs committed steps."""
    mutation(monkeypatch)
    for seed in range(MOST):
        try:
            if rollbacks(within_commit(seed)):
                return
        except AssertionError as broken:
            if "two-phase" in str(broken) or "identical" in str(broken):
                return
    if not any(simulate_seed("sharded", seed).broken in ("two-phase", "identical") for seed in range(2 * MOST)):
        pytest.fail(f"{mutation.__name__} was not caught in {3 * MOST} runs")
