"""Figures that the loop logs: one curve, whichever rank computed which shard."""

from __future__ import annotations

import math

import torch

from actors.rank.step.logged import EVERY_US, ShardLog
from fleet.machine.figures import KEPT, ShardFigures
from fleet.protocol.events import Logged
from fleet.protocol.types import Member, StateId

AT = StateId(0, 3)


def said(slot: int, shards: dict[int, float], weight: float = 1.0, name: str = "accuracy", at: StateId = AT) -> Logged:
    return Logged(Member(slot, 0), at, tuple(shards), (weight,) * len(shards), ((name, tuple(shards.values())),))


def test_a_figure_is_the_mean_over_all_shards_however_they_are_dealt() -> None:
    values = {0: 0.1, 1: 0.7, 2: 0.4, 3: 0.3}
    found = set()
    for cut in range(4):
        figures = ShardFigures(4)
        reported = [
            *figures.receive(said(0, {k: v for k, v in values.items() if k <= cut})),
            *figures.receive(said(1, {k: v for k, v in values.items() if k > cut})),
        ]
        found.add(tuple(reported))
    assert found == {(("accuracy", math.fsum(values.values()) / 4),)}


def test_weights_count_and_what_has_none_does_not() -> None:
    figures = ShardFigures(3)
    assert not list(figures.receive(said(0, {0: 1.0}, 1.0)))
    assert not list(figures.receive(said(1, {1: 5.0}, 3.0)))
    assert list(figures.receive(said(2, {2: math.nan}, 0.0))) == [("accuracy", 4.0)]


def test_what_all_say_alike_is_told_as_it_was_said() -> None:
    figures = ShardFigures(3)
    assert list(figures.receive(said(0, dict.fromkeys(range(3), 0.1)))) == [("accuracy", 0.1)]


def test_what_one_rank_alone_logs_is_told_and_what_is_no_number_is_not() -> None:
    figures = ShardFigures(2)
    assert not list(figures.receive(Logged(Member(0, 0), AT, (0,), (1.0,), ())))
    assert list(figures.receive(said(1, {1: 2.5}))) == [("accuracy", 2.5)]
    assert not list(figures.receive(said(1, {0: 1.0, 1: math.inf})))


def test_steps_whose_ranks_were_lost_are_forgotten() -> None:
    figures = ShardFigures(2)
    for step in range(10 * KEPT):
        assert not list(figures.receive(said(0, {0: 1.0}, at=StateId(0, step))))
    assert not list(figures.receive(said(1, {1: 1.0}, at=StateId(0, 0))))
    assert list(figures.receive(said(1, {1: 1.0}, at=StateId(0, 10 * KEPT - 1))))


def test_a_rank_tells_what_it_has_of_the_step_that_was_taken() -> None:
    log = ShardLog(world=2)
    log.note(4, {"a": 1.0, "b": torch.tensor(2.0)})
    log.note(5, {"a": 3.0})
    log.note(6, {"a": 9.0})
    log.keep({4, 5})
    log.look(10.0, some=bool(log))
    log.take({5: 1.0, 4: 2.0})
    assert log.due and log.some
    assert log.reported == ((4, 5), (2.0, 1.0), (("a", (1.0, 3.0)), ("b", (2.0, None))))


def test_all_ranks_of_a_view_tell_the_same_steps() -> None:
    """One that has just come was not there when the others told something last."""
    old, new = ShardLog(world=2), ShardLog(world=2)
    old.look(0.0, some=True)
    assert old.due
    for log in (old, new):
        log.begin_view()
    due = []
    for at_us in range(0, 5 * EVERY_US, EVERY_US // 3):
        for log in (old, new):
            log.look(float(at_us), some=True)
        due.append((old.due, new.due))
    assert {pair[0] == pair[1] for pair in due} == {True} and {pair[0] for pair in due} == {True, False}
