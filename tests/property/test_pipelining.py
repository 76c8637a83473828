"""The order of a pipeline's units: each once, nothing waits for ever, few activations are kept, and the bubble is that of the law."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.laws.parallelism import pipeline_bubble
from fleet.protocol.pipelining import BACKWARD_TICKS, FORWARD_TICKS, Half, Order, UnitHalf, order
from fleet.protocol.shards import share

TICKS = FORWARD_TICKS + BACKWARD_TICKS


@st.composite
def assignments(draw: st.DrawFn) -> list[list[list[int]]]:
    """Any number of stages, each with its own number of ranks, which divide the shards in any way."""
    shards = draw(st.integers(1, 24))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        ranks = draw(st.integers(1, 4))
        where = draw(st.lists(st.integers(0, ranks - 1), min_size=shards, max_size=shards))
        found.append([[shard for shard, rank in enumerate(where) if rank == place] for place in range(ranks)])
    return found


def carried_out(found: Order) -> set[tuple[int, UnitHalf]]:
    """(stage, turn) of all turns that come about where each rank keeps to its order, and waits for what a turn needs."""
    done = set[tuple[int, UnitHalf]]()
    left = {(stage, place): list(turns) for stage, column in enumerate(found.turns) for place, turns in enumerate(column)}
    moved = True
    while moved:
        moved = False
        for (stage, _), turns in left.items():
            if turns and needs(stage, turns[0], len(found.turns)) <= done:
                done.add((stage, turns.pop(0)))
                moved = True
    return done


def needs(stage: int, turn: UnitHalf, stages: int) -> set[tuple[int, UnitHalf]]:
    if turn.half is Half.FORWARD:
        return {(stage - 1, turn)} if stage else set()
    own = {(stage, UnitHalf(Half.FORWARD, turn.shard))}
    return own | {(stage + 1, turn)} if stage < stages - 1 else own


@given(assignments())
def test_each_unit_is_computed_once_where_it_is_assigned_and_no_rank_waits_for_ever(assigned: Sequence[Sequence[Sequence[int]]]) -> None:
    found = order(assigned)
    for column, turns_of in zip(assigned, found.turns, strict=True):
        for shards, turns in zip(column, turns_of, strict=True):
            assert sorted(turns) == sorted(UnitHalf(half, shard) for half in Half for shard in shards)
    assert len(carried_out(found)) == sum(len(turns) for column in found.turns for turns in column)


@given(assignments())
def test_no_more_units_wait_for_their_backward_than_stages_follow(assigned: Sequence[Sequence[Sequence[int]]]) -> None:
    for stage, column in enumerate(order(assigned).turns):
        for turns in column:
            waiting = 0
            for turn in turns:
                waiting += -1 if turn.half else 1
                assert waiting <= len(assigned) - stage


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 3))
def test_with_as_many_ranks_in_each_stage_the_bubble_is_that_of_the_law(stages: int, shards: int, replicas: int) -> None:
    ranges = [(replica * shards, (replica + 1) * shards) for replica in range(replicas)]
    column = [list(range(*one)) for one in ranges]
    ticks = order([column] * stages).ticks
    assert 1 - shards * TICKS / ticks == pytest.approx(pipeline_bubble(stages, shards))


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 6), st.data())
def test_where_a_rank_of_a_stage_is_lost_the_step_takes_little_more_than_its_units(
    stages: int, replicas: int, each: int, data: st.DataObject
) -> None:
    """Its siblings share out its units; the other stages keep theirs."""
    replicas += 1
    shards = replicas * each
    whole = [tuple(range(replica * each, (replica + 1) * each)) for replica in range(replicas)]
    short = data.draw(st.integers(0, stages - 1))
    ranges = [(place * shards // (replicas - 1), (place + 1) * shards // (replicas - 1)) for place in range(replicas - 1)]
    fewer = share([()] * (replicas - 1), ranges, shards).assigned
    found = order([fewer if stage == short else whole for stage in range(stages)])
    fullest = max(map(len, fewer))
    assert found.ticks <= (fullest + 2 * stages) * TICKS


def test_stages_that_compute_other_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="other shards"):
        order([[[0, 1]], [[0]]])
    with pytest.raises(ValueError, match="other shards"):
        order([[[0], [0]], [[0], [0]]])


def test_the_order_of_two_stages_is_1f1b() -> None:
    first, last = order([[[0, 1, 2]]] * 2).turns
    words = ["".join(f"{'FB'[turn.half]}{turn.shard} " for turn in turns) for (turns,) in (first, last)]
    assert words == ["F0 F1 B0 F2 B1 B2 ", "F0 B0 F1 B1 F2 B2 "]
