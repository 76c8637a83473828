"""When nothing gets better any more: what ``fleet.EarlyStopping`` says, and what survives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

import fleet
from actors.rank.current import within
from fleet.errors import ConfigError, LoopError
from fleet.protocol.once import Once, key_of
from fleet.protocol.types import Member, StateId


class Recalling:
    """A run that keeps what is recalled where the coordinator does; ``here`` is None in an attempt that is repeated."""

    def __init__(self, once: Once) -> None:
        self.once, self.here = once, StateId(0, 0)
        self.repeated = False

    def recalled(self, fn: Any, *, name: str) -> Any:
        import json

        if self.repeated:
            return None
        key, me = key_of(self.here, name), Member(0, 0)
        answer: Any = self.once.ask(me, key, lambda member: True, 0.0)[-1]
        if answer.result is not None:
            return json.loads(answer.result)
        found = fn(json.loads(answer.before or "null"), self.here.step)
        self.once.done(me, key, json.dumps(found), 0.0)
        return found


@pytest.fixture
def run() -> Iterator[Any]:
    one: Any = Recalling(Once())
    with within(one):
        yield one


def said(run: Any, stopping: fleet.EarlyStopping, values: list[float], first: int = 1) -> list[bool]:
    found = []
    for step, value in enumerate(values, first):
        run.here = StateId(run.here.history, step)
        found.append(stopping.update(value))
    return found


def test_patience_counts_values_in_a_row_that_are_no_better(run: Any) -> None:
    stopping = fleet.EarlyStopping(2, min_delta=0.1)
    assert said(run, stopping, [1.0, 0.95, 0.85, 0.8, math.nan]) == [False, False, False, False, True]
    assert (stopping.best, stopping.waited) == (0.85, 2)


def test_more_is_better_where_it_is_said(run: Any) -> None:
    assert said(run, fleet.EarlyStopping(1, mode="max"), [0.5, 0.6, 0.6]) == [False, False, True]


def test_a_process_that_comes_later_hears_what_the_others_hear(run: Any) -> None:
    said(run, fleet.EarlyStopping(3), [1.0, 2.0, 2.0])
    assert said(run, fleet.EarlyStopping(3), [2.0], first=4) == [True]


def test_a_resume_goes_on_and_what_was_taken_back_is_forgotten(run: Any) -> None:
    said(run, fleet.EarlyStopping(3), [1.0, 2.0, 2.0])
    run.once.roll_back(StateId(0, 2))
    run.here = StateId(1, 0)
    assert said(run, fleet.EarlyStopping(3), [2.0, 2.0, 2.0], first=2) == [False, False, True], "step 2 is evaluated again, and counts once"


def test_in_an_attempt_that_is_repeated_it_is_false_and_remembers_nothing(run: Any) -> None:
    stopping = fleet.EarlyStopping(1)
    said(run, stopping, [1.0])
    run.repeated = True
    assert said(run, stopping, [9.0]) == [False] and stopping.waited == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [({"patience": 0}, "patience = 0"), ({"patience": 2.5}, "patience = 2.5"), ({"patience": 1, "min_delta": -1.0}, "min_delta = -1.0"),
     ({"patience": 1, "min_delta": math.nan}, "min_delta = nan"), ({"patience": 1, "mode": "least"}, "mode = 'least'.*min for a loss")],
)  # fmt: skip
def test_what_is_impossible_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fleet.EarlyStopping(**given)


def test_outside_of_a_run_it_says_so() -> None:
    with pytest.raises(LoopError, match="outside of a train function"):
        fleet.EarlyStopping(1).update(1.0)
