"""Votes, the budget of verification, time to detection against trials, and the state that evidence clears."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.protocol.types import Member, StateId
from fleet.protocol.verification import NONE, Sampling, expected_steps_to_detection, samples
from policies.corruption import MajorityRules, after_vote, vote
from tests.support.undetected import hit_probability, undetected_ratio

A, B, C, D = (Member(slot, 0) for slot in range(4))


def test_equal_digests_agree() -> None:
    assert after_vote(vote({A: "x", B: "x"})).action == "carry_on"


def test_the_minority_is_guilty() -> None:
    outcome = vote({A: "x", B: "y", C: "x", D: "z"})
    assert outcome.outcome == "tie"  # two of four are no majority
    outcome = vote({A: "x", B: "y", C: "x"})
    decision = after_vote(outcome)
    assert outcome.guilty == (B,) and decision.action == "evict" and "1.0" in decision.reason


def test_the_third_decides() -> None:
    assert vote({A: "x", B: "y", C: "y"}).guilty == (A,)


def test_two_ranks_that_differ_are_not_judged() -> None:
    decision = after_vote(vote({A: "x", B: "y"}))
    assert decision.action == "retry" and "no rank is accused" in decision.reason


def test_ranks_that_differ_again_are_no_matter_of_the_hardware() -> None:
    verdict = MajorityRules().judge({A: "x", B: "y", C: "x"}, {}, again=True)
    assert (verdict.decision.action, verdict.guilty) == ("stop", ())
    assert MajorityRules().judge({A: "x", B: "x"}, {}, again=True).decision.action == "carry_on"


def test_three_different_answers_name_nobody() -> None:
    assert vote({A: "x", B: "y", C: "z"}).guilty == ()
    assert after_vote(vote({A: "x", B: "y", C: "z"})).action == "stop"


def test_no_digest_is_no_vote() -> None:
    with pytest.raises(ValueError, match="at least one digest"):
        vote({})


@given(st.dictionaries(st.integers(0, 30).map(lambda slot: Member(slot, 0)), st.sampled_from("xyz"), min_size=1))
def test_a_guilty_rank_is_never_of_the_majority_and_its_size_bounds_the_guilty(digests: dict[Member, str]) -> None:
    outcome = vote(digests)
    assert 2 * len(outcome.guilty) < len(digests)
    assert all(digests[member] != outcome.digest for member in outcome.guilty)
    assert bool(outcome.guilty) == (outcome.outcome == "outvoted")


@given(st.floats(0.0005, 0.5), st.integers(1, 16), st.integers(1, 8), st.floats(0, 0.5))
def test_verification_stays_within_its_budget_and_uses_it(budget: float, ranks: int, each: int, chunks: float) -> None:
    sampling = Sampling(budget=budget, chunks=chunks)
    every, cost = sampling.every(ranks * each, ranks), sampling.cost(ranks * each, ranks)
    assert cost / every <= budget * (1 + 1e-6) and (every == 1 or cost / (every - 1) > budget * (1 - 1e-6))


def test_one_percent_of_four_shards_a_rank_is_every_25_steps_and_off_is_off() -> None:
    assert Sampling().every(16, 4) == 25 and Sampling(budget=0).every(16, 4) == 0
    with pytest.raises(ConfigError, match="verify.budget = 2"):
        Sampling(budget=2)
    with pytest.raises(ConfigError, match="ranks = 5"):
        Sampling().cost(4, 5)


def test_every_shard_has_its_turn() -> None:
    assert {Sampling.shard(number, 3, 7) for number in range(4)} == {3, 4, 5, 6}
    with pytest.raises(ValueError, match="no shard"):
        Sampling.shard(0, 3, 3)


@pytest.mark.parametrize(("every", "hit"), [(1, 1.0), (25, 1.0), (25, 0.25), (4, 0.1)])
def test_time_to_detection_and_exposure_agree_with_trials(every: int, hit: float) -> None:
    chance, trials = random.Random(7), 20_000
    latencies = []
    for _ in range(trials):
        step = chance.randrange(every) + 1
        while chance.random() >= hit:
            step += every
        latencies.append(step)
    mean = sum(latencies) / trials
    assert mean == pytest.approx(expected_steps_to_detection(every, hit), rel=0.04)
    for steps in (every // 2, every, 3 * every + 1):
        undetected = sum(latency > steps for latency in latencies) / trials
        assert undetected == pytest.approx(undetected_ratio(steps, every, hit), abs=0.02)


@given(st.integers(1, 40), st.floats(0.05, 1))
def test_the_mean_is_the_sum_of_what_is_undetected(every: int, hit: float) -> None:
    total = sum(undetected_ratio(steps, every, hit) for steps in range(every * 400))
    assert total == pytest.approx(expected_steps_to_detection(every, hit), rel=1e-3)


def test_what_is_never_looked_at_is_never_found() -> None:
    assert expected_steps_to_detection(0, 1.0) == expected_steps_to_detection(25, 0.0) == float("inf")
    assert undetected_ratio(1000, 0, 1.0) == 1.0
    assert hit_probability(0.25) == 0.25 and hit_probability(0.5, 2) == 0.75
    with pytest.raises(ValueError, match="no probability"):
        hit_probability(1.5)


def test_wrong_weights_cost_no_step() -> None:
    decision, state = MajorityRules().go_back(StateId(1, 90), StateId(1, 90), [StateId(1, 50)])
    assert decision.action == "carry_on" and state == StateId(1, 90)


def test_a_wrong_computation_goes_back_to_before_the_last_passed_verification() -> None:
    kept = [StateId(1, 20), StateId(1, 60), StateId(1, 80)]
    decision, state = MajorityRules(hit=0.75).go_back(StateId(1, 90), StateId(1, 65), kept)
    assert state == StateId(1, 60) and decision.action == "go_back"
    assert decision.fields["steps_lost"] == 30 and decision.fields["residual"] == 0.25


@pytest.mark.parametrize("cleared", [StateId(1, 10), StateId(0, 85)])
def test_what_nothing_clears_begins_anew(cleared: StateId) -> None:
    decision, state = MajorityRules().go_back(StateId(1, 90), cleared, [StateId(1, 20)])
    assert state is None and decision.action == "begin_anew"


@given(st.lists(st.integers(0, 100)), st.integers(0, 49))
def test_no_state_after_the_last_passed_verification_is_ever_cleared(kept: list[int], passed: int) -> None:
    _, state = MajorityRules().go_back(StateId(2, 50), StateId(2, passed), [StateId(2, step) for step in kept])
    assert state is None if all(step > passed for step in kept) else state == StateId(2, max(step for step in kept if step <= passed))


def test_every_rank_is_checked_by_another_one_and_by_each_in_turn() -> None:
    ranges = [(0, 4), (4, 8), (8, 12), (12, 16)]
    sampling = Sampling(budget=0.25)
    found = [(step, samples(sampling, step, ranges, 16)) for step in range(16)]
    assert [step for step, one in found if one is not None] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    seen = set()
    for _, one in found:
        assert one is not None
        for rank, shard in enumerate(one.checked):
            owner = shard // 4
            assert owner != rank
            assert one.own[owner] == shard
            seen.add((rank, owner, shard))
    assert len({(rank, owner) for rank, owner, _ in seen}) == 12
    assert {shard for _, _, shard in seen} == set(range(16))


def test_off_or_alone_nothing_is_computed_again() -> None:
    assert samples(Sampling(budget=0.0), 9, [(0, 8), (8, 16)], 16) is None
    assert samples(Sampling(budget=1.0), 9, [(0, 16)], 16) is None


def test_a_spare_checks_others_and_is_not_checked() -> None:
    """It computes no shard of its own. The sums that it adds up are checked like any other's."""
    found = [samples(Sampling(budget=1.0), step, [(0, 8), (8, 16), (16, 16)], 16) for step in range(6)]
    taken = [one for one in found if one is not None]
    assert len(taken) == 6 and all(one.own[2] == NONE and 0 <= one.own[0] < 8 <= one.own[1] for one in taken)
    assert all(one.owners[rank] != rank and one.checked[rank] == one.own[one.owners[rank]] for one in taken for rank in range(3))


def test_who_has_no_voice_is_judged_by_those_who_have() -> None:
    verdict = MajorityRules().judge({A: "x"}, {B: "x", C: "y"})
    assert (verdict.decision.action, verdict.guilty) == ("evict", (C,))
    assert MajorityRules().judge({A: "x", B: "y"}, {C: "y"}).decision.action == "retry"


def test_one_word_alone_convicts_nobody() -> None:
    assert MajorityRules().judge({A: "x"}, {B: "y"}).guilty == ()
    assert MajorityRules().judge({A: "x"}, {B: "y", C: "y"}).decision.action == "retry"


def test_kept_states_of_older_histories_are_cleared_too() -> None:
    decision, state = MajorityRules().go_back(StateId(2, 50), StateId(2, 45), [StateId(1, 40)])
    assert (decision.action, state) == ("go_back", StateId(1, 40))
    assert MajorityRules().go_back(StateId(2, 50), StateId(2, 50), [])[0].action == "carry_on"
