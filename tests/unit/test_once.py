"""What is done once in a run: who may do it, who hears of it, and what a rollback takes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fleet.protocol.instructions import Instruction, OnceAnswer, Write
from fleet.protocol.once import BEGIN, Once, key_of
from fleet.protocol.records import OnceRecord
from fleet.protocol.types import Member, StateId

A, B, C = (Member(slot, 0) for slot in range(3))
KEY = key_of(BEGIN, "prepare")


def alive(*dead: Member) -> Callable[[Member], bool]:
    return lambda member: member not in dead


def answers(said: list[Instruction]) -> list[OnceAnswer]:
    return [one for one in said if isinstance(one, OnceAnswer)]


def test_the_first_does_it_and_all_who_asked_hear_of_it() -> None:
    once = Once()
    assert answers(once.ask(A, KEY, alive(), 0.0)) == [OnceAnswer((A,), KEY, None)]
    assert not once.ask(B, KEY, alive(), 0.1)
    assert answers(once.done(A, KEY, "1", 0.2)) == [OnceAnswer((A, B), KEY, "1")]
    assert answers(once.ask(C, KEY, alive(), 9.0)) == [OnceAnswer((C,), KEY, "1")]


def test_an_answer_that_was_lost_is_repeated_and_written_once() -> None:
    once = Once()
    first, again = once.ask(A, KEY, alive(), 0.0), once.ask(A, KEY, alive(), 0.5)
    assert answers(first) == answers(again)
    assert [type(one) for one in first if isinstance(one, Write)] and not [one for one in again if isinstance(one, Write)]


def test_another_does_it_when_the_first_is_lost() -> None:
    once = Once()
    once.ask(A, KEY, alive(), 0.0)
    assert answers(once.ask(B, KEY, alive(A), 0.5)) == [OnceAnswer((B,), KEY, None)]
    assert answers(once.done(B, KEY, "2", 1.0)) == [OnceAnswer((B,), KEY, "2")]


def test_of_two_results_the_first_counts() -> None:
    once = Once()
    once.ask(A, KEY, alive(), 0.0)
    once.ask(B, KEY, alive(A), 0.5)
    once.done(B, KEY, "2", 1.0)
    assert answers(once.done(A, KEY, "1", 1.5)) == [OnceAnswer((A,), KEY, "2")]


def step(number: int, history: int = 0) -> str:
    return key_of(StateId(history, number), "evaluate")


def test_who_does_it_hears_what_came_of_it_the_last_time() -> None:
    once = Once()
    for number in (50, 100):
        once.ask(A, step(number), alive(), 0.0)
        once.done(A, step(number), f'"{number}"', 0.0)
    (answer,) = answers(once.ask(A, step(150), alive(), 0.0))
    assert answer.before == '"100"'
    (answer,) = answers(once.ask(A, key_of(StateId(0, 150), "another"), alive(), 0.0))
    assert answer.before == ""


def test_a_rollback_takes_back_what_came_of_later_steps() -> None:
    once = Once()
    for number in (50, 100):
        once.done(A, step(number), f'"{number}"', 0.0)
    once.roll_back(StateId(0, 70))
    (answer,) = answers(once.ask(A, step(100, history=1), alive(), 0.0))
    assert answer.result is None and answer.before == '"50"'


@pytest.mark.parametrize("done", [True, False])
def test_it_is_rebuilt_from_the_journal(done: bool) -> None:
    once, records = Once(), []
    said = once.ask(A, step(50), alive(), 0.0) + (once.done(A, step(50), "1", 1.0) if done else [])
    records = [one.record for one in said if isinstance(one, Write)]
    again = Once()
    for record in records:
        assert isinstance(record, OnceRecord)
        again.replay(record)
    assert answers(again.ask(B, step(50), alive(), 2.0)) == ([OnceAnswer((B,), step(50), "1")] if done else [])


def test_a_thousand_results_of_a_name_are_kept() -> None:
    once = Once()
    for number in range(1100):
        once.done(A, step(number), str(number), 0.0)
    assert answers(once.ask(A, step(5), alive(), 0.0))[0].result is None
    assert answers(once.ask(A, step(1099), alive(), 0.0))[0].result == "1099"
