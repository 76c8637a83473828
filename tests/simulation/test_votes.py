"""The vote that commits a step: what is not finite is computed anew by all, whoever is lost meanwhile. What breaks the vote is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pytest

from fleet.protocol.chunks import Claim
from fleet.protocol.types import StateId
from fleet.protocol.vote import CommitVote, Doubt, Words
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.sharded import SimChunks
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, rollbacks, simulate, simulate_seed

Patch = pytest.MonkeyPatch
MOST, STEP = 120, 4
LAYOUTS = ("none", "zero1", "fsdp")
OVERFLOW = Trouble(kind="overflow", point="compute", step=STEP)


def plan(sharding: str, seed: int) -> Plan:
    settings = dataclasses.replace(small(4), optimizer_sharding=sharding)
    return Plan(seed=seed, settings=settings, steps=12, capacity=4)


def again(outcome: Outcome) -> int:
    """How often a rank has computed a step anew."""
    return sum(" again " in line for line in outcome.trace)


@pytest.mark.parametrize("sharding", LAYOUTS)
def test_a_sum_that_is_not_finite_is_computed_anew_by_all_and_ends_with_the_right_state(sharding: str) -> None:
    for seed in range(5):
        outcome = completed(plan(sharding, seed), OVERFLOW)
        assert again(outcome) == 4 and rollbacks(outcome) == 0


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
@pytest.mark.parametrize("point", ["ready", "decided"])
def test_a_rank_lost_within_such_a_vote_costs_no_state(sharding: str, point: str) -> None:
    """Some have heard that the sum is not finite, and others that their group is gone: they have sums that nobody steps with."""
    outcomes = [completed(plan(sharding, seed), OVERFLOW, Trouble(kind="kill", point=point, step=STEP)) for seed in range(20)]
    assert not any(map(rollbacks, outcomes))
    assert point == "ready" or {1, 2} & set(map(again, outcomes)), "all that are left have heard it, or nobody has, in each of the runs"


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_every_invariant_holds_where_sums_are_not_finite(layout: int) -> None:
    """The family has the layouts in turn."""
    outcomes = [simulate_seed("overflows", seed, keep_trace=True) for seed in range(layout, MOST // 2, len(LAYOUTS))]
    assert not [outcome.report() for outcome in outcomes if outcome.broken]
    assert sum(again(outcome) > 0 for outcome in outcomes) > len(outcomes) // 2


# ---- mutations ---------------------------------------------------------------------------------------------------------------------------


def one_word_is_enough(patch: Patch) -> None:
    right = CommitVote.decide

    def wrong(self: CommitVote, words: Words, norm_limit: float) -> Doubt | None:
        return right(self, dataclasses.replace(words, finite=(any(words.finite),)), norm_limit)

    patch.setattr(CommitVote, "decide", wrong)


def own_word_is_enough(patch: Patch) -> None:
    right, finds, own = CommitVote.decide, SimChunks.word, dict[CommitVote, bool]()

    def found(self: SimChunks, sums: Mapping[int, int]) -> bool:
        vote = self.rank.rank_machine.vote
        own[vote] = finds(self, sums)
        return own[vote]

    def wrong(self: CommitVote, words: Words, norm_limit: float) -> Doubt | None:
        return right(self, dataclasses.replace(words, finite=(own[self],)), norm_limit)

    patch.setattr(SimChunks, "word", found)
    patch.setattr(CommitVote, "decide", wrong)


def nobody_is_asked(patch: Patch) -> None:
    patch.setattr(CommitVote, "voters", lambda self, size: ())


def who_was_ready_gives_up_its_sums(patch: Patch) -> None:
    patch.setattr(CommitVote, "lost", CommitVote.begin)


def who_is_ready_steps_where_nobody_has(patch: Patch) -> None:
    right = CommitVote.follow

    def wrong(self: CommitVote, claims: Sequence[Claim], me: int, target: StateId) -> bool:
        return right(self, claims, me, target) or (claims[me].ready and claims[me].state == target)

    patch.setattr(CommitVote, "follow", wrong)


def what_is_rejected_is_taken(patch: Patch) -> None:
    right = CommitVote.reject

    def wrong(self: CommitVote, doubt: Doubt) -> None:
        right(self, doubt)

    patch.setattr(CommitVote, "reject", wrong)


SPREAD = ("zero1", "fsdp")
MUTATIONS: dict[Callable[[Patch], None], tuple[Sequence[str], Trouble, tuple[str, ...]]] = {
    one_word_is_enough: (SPREAD, OVERFLOW, ("identical",)),
    own_word_is_enough: (SPREAD, OVERFLOW, ("identical", "two-phase", "gathers")),
    nobody_is_asked: (SPREAD, Trouble(kind="kill", point="ready", step=STEP), ("two-phase", "a rollback")),
    who_was_ready_gives_up_its_sums: (SPREAD, Trouble(kind="kill", point="decided", step=STEP), ("two-phase", "a rollback")),
    who_is_ready_steps_where_nobody_has: (SPREAD, Trouble(kind="kill", point="ready", step=STEP), ("two-phase",)),
    what_is_rejected_is_taken: (("none",), OVERFLOW, ("identical",)),
}
CASES = [(mutation, sharding, *shown) for mutation, (layouts, *shown) in MUTATIONS.items() for sharding in layouts]


@pytest.mark.parametrize(
    ("mutation", "sharding", "trouble", "names"), CASES, ids=[f"{mutation.__name__}-{sharding}" for mutation, sharding, *_ in CASES]
)
def test_a_mutation_is_caught(
    mutation: Callable[[Patch], None], sharding: str, trouble: Trouble, names: tuple[str, ...], monkeypatch: Patch
) -> None:
    """One loss, or one gradient that is not finite, breaks an invariant, or costs committed steps."""

    def broken(seed: int) -> str:
        outcome = simulate(with_troubles(plan(sharding, seed), (trouble,)))
        return outcome.broken or ("a rollback" if rollbacks(outcome) else "")

    assert not any(map(broken, range(5)))
    mutation(monkeypatch)
    met = set[str]()
    for seed in range(MOST):
        met.add(broken(seed))
        if met & set(names):
            return
    pytest.fail(f"{mutation.__name__} broke none of {names} in {MOST} seeds; it broke {sorted(met)}")
