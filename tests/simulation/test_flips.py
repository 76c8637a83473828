"""Bits that flip in what simulated ranks hold: what is wrong gets into no sum while another rank can tell, and each safeguard is needed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from fleet.machine import views
from fleet.protocol.causes import EndWhy
from fleet.protocol.records import DecisionMade, ProcessLost
from fleet.protocol.replica_check import ReplicaCheck
from fleet.protocol.types import StateId
from fleet.simulation.plan import Plan, Trouble, flipped_plan, small, with_troubles
from tests.simulation import plans
from tests.simulation.runs import simulate
from tests.simulation.test_bad_luck import completed, of, run

Patch = pytest.MonkeyPatch


def test_a_flipped_rank_is_evicted_and_the_run_goes_on_where_it_is() -> None:
    outcome = completed(Trouble(kind="flip", point="compute", step=5, slot=1))
    [lost] = of(ProcessLost, outcome)
    assert lost.member.slot == 1
    assert "silent corruption: weights at step 5" in str(lost.cause)


def test_two_that_differ_go_back_once_and_nobody_is_accused() -> None:
    outcome = completed(Trouble(kind="flip", point="compute", step=5, slot=1), world=2)
    assert next(record.action for record in of(DecisionMade, outcome) if record.policy == "corruption") == "retry"
    assert not [lost for lost in of(ProcessLost, outcome) if "corruption" in str(lost.cause)]


def test_two_that_differ_again_where_they_went_on_run_a_loop_that_is_wrong() -> None:
    outcome = run(*(Trouble(kind="flip", point="compute", step=5 + slot, slot=slot) for slot in (0, 1)), world=4)
    assert outcome.status == "failed"
    assert outcome.world.ended is not None and outcome.world.ended.why is EndWhy.LOOP_WRONG
    assert "differ again" in outcome.reason


def test_a_flip_at_the_finish_barrier_is_outvoted() -> None:
    outcome = completed(Trouble(kind="flip", point="committed", step=30, slot=2))
    assert [lost.member.slot for lost in of(ProcessLost, outcome)] == [2]


def test_with_sharded_state_nobody_is_named() -> None:
    """Parameters differ: most ranks have each from its owner, so the run ends before the sum is used."""
    settings = dataclasses.replace(small(4), optimizer_sharding="zero1")
    trouble = Trouble(kind="flip", point="compute", step=5, slot=1)
    outcome = simulate(with_troubles(Plan(seed=1, settings=settings, steps=12, capacity=4), (trouble,)))
    assert not outcome.broken, outcome.report()
    assert "weights of the ranks differ at step 5" in outcome.reason
    assert not of(ProcessLost, outcome)


def differences_go_unseen(patch: Patch) -> None:
    right = ReplicaCheck.differ
    patch.setattr(ReplicaCheck, "differ", lambda self, digests: right(self, [0 for _ in digests]))


def whoever_was_given_a_state_votes(patch: Patch) -> None:
    right = ReplicaCheck.join

    def wrong(self: ReplicaCheck, generation: int, here: StateId, receiver: bool) -> None:
        right(self, generation, here, receiver)
        self.witness = True

    patch.setattr(ReplicaCheck, "join", wrong)


def nobody_judges(patch: Patch) -> None:
    patch.setattr(views, "judge", lambda machine, now_s: None)


@pytest.mark.parametrize(
    ("mutation", "names"),
    [
        (differences_go_unseen, ("corruption",)),
        (whoever_was_given_a_state_votes, ("corruption",)),
        (nobody_judges, ("ends",)),
    ],
)
def test_a_mutation_is_caught(mutation: Callable[[Patch], None], names: tuple[str, ...], monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    met = []
    kept = [plans.read(path).plan for path in sorted(plans.KEPT.glob("flips-*.json"))]
    for plan in itertools.chain(kept, map(flipped_plan, range(400))):
        met.append(simulate(plan).broken)
        if met[-1] in names:
            return
    pytest.fail(f"{mutation.__name__} broke none of {names}; it broke {sorted(set(met))}")
