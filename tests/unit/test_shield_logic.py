"""The shield's rules: which death Ray Train's controller may see, and when. No Ray in here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.deaths import FAILED, UNSETTLED, Backoff, Condition, DeathWatch, PollVerdict

RUN, DONE, PENDING, HUNG, UNSURE, RAISED, DEAD = (
    Condition.RUNNING,
    Condition.DONE,
    Condition.PENDING,
    Condition.HUNG,
    Condition.UNSURE,
    Condition.RAISED,
    Condition.DEAD,
)
LATER_S = 100.0
"""Long after the start: no failure is an early one."""


def watch(slots: int = 4) -> DeathWatch:
    deaths = DeathWatch(settle_s=0.0)
    for rank in range(slots):
        deaths.started(rank, 0.0)
    return deaths


def judge(*conditions: Condition, now_s: float = LATER_S) -> PollVerdict:
    return watch(len(conditions)).judge(dict(enumerate(conditions)), now_s)


def test_a_healthy_group_is_left_alone() -> None:
    assert judge(RUN, RUN, DONE) == PollVerdict()


@pytest.mark.parametrize("condition", [DEAD, RAISED])
def test_one_failure_is_the_candidate(condition: Condition) -> None:
    assert judge(RUN, condition, RUN) == PollVerdict(candidate=1)


def test_survivors_go_on_before_a_replacement_starts() -> None:
    deaths = DeathWatch(settle_s=0.5)
    assert deaths.judge({0: RUN, 1: DEAD}, LATER_S) == PollVerdict()
    assert deaths.judge({0: RUN, 1: DEAD, 2: DEAD}, LATER_S + 0.4) == PollVerdict()
    assert deaths.judge({0: RUN, 1: DEAD, 2: DEAD}, LATER_S + 0.5).candidate == 1
    assert DeathWatch(settle_s=0.5).judge({0: DEAD, 1: DEAD}, LATER_S).restart, "nobody is left to go on"


def test_of_two_failures_one_is_shown() -> None:
    assert judge(DEAD, RUN, DEAD) == PollVerdict(candidate=0)


def test_the_slot_that_failed_first_comes_first() -> None:
    deaths = watch(3)
    assert deaths.judge({0: RUN, 1: RUN, 2: DEAD}, LATER_S).candidate == 2
    assert deaths.judge({0: DEAD, 1: RUN, 2: DEAD}, LATER_S + 1).candidate == 2


@pytest.mark.parametrize("condition", sorted(UNSETTLED - {HUNG}, key=str))
def test_nothing_is_shown_while_another_may_not_answer(condition: Condition) -> None:
    verdict = judge(DEAD, condition, RUN)
    assert verdict.candidate is None and "[1]" in verdict.reason


def test_a_rank_out_of_reach_is_not_taken_for_dead() -> None:
    assert judge(RUN, UNSURE, RUN) == PollVerdict()


def test_a_hung_rank_is_killed_and_not_shown() -> None:
    assert judge(RUN, HUNG, RUN) == PollVerdict(kill=frozenset({1}))
    verdict = judge(DEAD, HUNG, RUN)
    assert verdict.kill == {1} and verdict.candidate is None


def test_the_dead_are_finished_when_the_rest_has_finished() -> None:
    assert judge(DONE, DEAD, RAISED, DONE) == PollVerdict(finish=frozenset({1, 2}))


def test_a_group_without_survivors_is_started_anew() -> None:
    assert judge(DEAD, RAISED) == PollVerdict(restart=True)


def test_a_slot_that_keeps_failing_waits_longer_each_time() -> None:
    backoff = Backoff(stable_s=10.0, free=2, first_s=1.0, limit_s=5.0)
    assert [backoff.delay_s(streak) for streak in (0, 1, 2, 3, 4, 5, 6, 1000)] == [0, 0, 0, 1, 2, 4, 5, 5]


def test_a_crash_loop_is_slowed_down_and_forgiven() -> None:
    deaths, now_s = watch(2), 0.0
    for _ in range(3):
        now_s += 1.0
        last = deaths.judge({0: RUN, 1: DEAD}, now_s)
        deaths.started(1, now_s)
    assert last.candidate is None and "keep failing" in last.reason
    assert deaths.judge({0: RUN, 1: DEAD}, now_s + 50.0).candidate == 1  # it lived long enough: the streak is over


def test_a_delayed_slot_is_shown_when_its_time_has_come() -> None:
    deaths = watch(2)
    for _ in range(3):
        deaths.attempt_failed(1, LATER_S)
    assert deaths.judge({0: RUN, 1: DEAD}, LATER_S + 0.9).candidate is None
    assert deaths.judge({0: RUN, 1: DEAD}, LATER_S + 1.0).candidate == 1


def test_a_delayed_slot_does_not_hold_up_another() -> None:
    deaths = watch(3)
    for _ in range(5):
        deaths.attempt_failed(1, LATER_S)
    assert deaths.judge({0: RUN, 1: DEAD, 2: DEAD}, LATER_S).candidate == 2


@given(st.lists(st.sampled_from(Condition), min_size=1, max_size=6))
def test_what_is_shown_can_be_replaced(conditions: list[Condition]) -> None:
    verdict = judge(*conditions)
    if verdict.candidate is not None:
        others = [condition for rank, condition in enumerate(conditions) if rank != verdict.candidate]
        assert conditions[verdict.candidate] in FAILED
        assert not any(condition in UNSETTLED for condition in others)
        assert any(condition not in FAILED for condition in others)


@given(st.lists(st.sampled_from([RUN, DONE, RAISED, DEAD]), min_size=1, max_size=6))
def test_a_settled_group_never_stalls(conditions: list[Condition]) -> None:
    verdict = judge(*conditions)
    assert bool(FAILED & set(conditions)) == (verdict.restart or bool(verdict.finish) or verdict.candidate is not None)
