"""Bits that flip in what simulated ranks hold: what is wrong gets into no sum while another rank can tell, and each safeguard is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fleet.machine import views
from fleet.protocol.causes import EndWhy
from fleet.protocol.records import DecisionMade, ProcessLost
from fleet.protocol.replica_check import ReplicaCheck
from fleet.protocol.types import StateId
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from tests.simulation.runs import COMMAND, simulate, simulate_flips
from tests.simulation.test_bad_luck import completed, of, run

Patch = pytest.MonkeyPatch
SEEDS = 150
REGRESSIONS = {
    85: "told to leave by the word of one that saw a difference, the others never said what they held: the view formed again for ever",
    373: "what one rank alone held flipped while it gave it: newcomers took a step with what it had put in, and saw it in the next one",
    466: "all ranks went on from a checkpoint that one had saved while it was alone, and wrong",
    539: "a rank that was given its state had a voice once the view had formed anew, and outvoted the one that was right",
    1807: "one rank was left at the finish, and wrong",
    44: "ranks that were to go back said again what they had held, and it was taken for a second difference",
    169: "the copy to go back to was lost with its node, so that the run began anew",
    589: "two ranks differed before their first step, where nothing is older",
    163: "a rank was alone in its view and wrong, and the invariant expected somebody to tell",
    239: "two corrupt ranks that differ can tell, and the invariant took that for what nobody sees",
    384: "a rank that was alone at the finish barrier wrote what had flipped there, and all went on from that",
    438: "a rank that had its last state from one that was wrong voted for it at the finish barrier",
    1165: "ranks that had their state from one that was wrong had to be kept from voting for it",
}


def test_invariants_hold_when_bits_flip() -> None:
    reports = [outcome.report(COMMAND + " --flips") for outcome in map(simulate_flips, (*range(SEEDS), *REGRESSIONS)) if outcome.broken]
    assert not reports, "\n\n".join(reports[:3])


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
    assert outcome.world.why is EndWhy.LOOP_WRONG
    assert "differ again" in outcome.reason


def test_a_flip_at_the_finish_barrier_is_outvoted() -> None:
    outcome = completed(Trouble(kind="flip", point="committed", step=30, slot=2))
    assert [lost.member.slot for lost in of(ProcessLost, outcome)] == [2]


def test_with_sharded_state_nobody_is_named() -> None:
    """Parameters differ: most ranks have each from its owner, so the run ends before the sum is used."""
    settings = dataclasses.replace(small(4), optimizer_sharding="zero1")
    trouble = Trouble(kind="flip", point="compute", step=5, slot=1)
    outcome = simulate(with_troubles(Plan(seed=1, settings=settings, steps=12, capacity=4), (trouble,)))
    assert not outcome.broken, outcome.report(COMMAND)
    assert "weights of the ranks differ at step 5" in outcome.reason
    assert not of(ProcessLost, outcome)


def differences_go_unseen(patch: Patch) -> None:
    right = ReplicaCheck.differ
    patch.setattr(ReplicaCheck, "differ", lambda self, digests: right(self, [0 for _ in digests]))


def whoever_was_given_a_state_votes(patch: Patch) -> None:
    right = ReplicaCheck.seat

    def wrong(self: ReplicaCheck, generation: int, here: StateId, receiver: bool) -> None:
        right(self, generation, here, receiver)
        self.witness = True

    patch.setattr(ReplicaCheck, "seat", wrong)


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
    for seed in (*REGRESSIONS, *range(400)):
        met.append(simulate_flips(seed).broken)
        if met[-1] in names:
            return
    pytest.fail(f"{mutation.__name__} broke none of {names}; it broke {sorted(set(met))}")
