"""The order of a pipeline's units: each once, nothing waits for ever, few activations are kept, and the bubble is that of the law."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

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


def carried_out(found: Order, before: Iterable[tuple[int, UnitHalf]] = ()) -> set[tuple[int, UnitHalf]]:
    """(stage, turn) of all turns that come about where each rank keeps to its order, and waits for what a turn needs."""
    done = set(before)
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
    """For each of the ranks beside it, of one stage, that compute a rank's shards."""
    for stage, column in enumerate(order(assigned).turns):
        for shards, turns in zip(assigned[stage], column, strict=True):
            beside = [assigned[one] for one in (stage - 1, stage + 1) if 0 <= one < len(assigned)]
            ways = max((sum(not set(shards).isdisjoint(each) for each in one) for one in beside), default=1)
            waiting = 0
            for turn in turns:
                waiting += -1 if turn.half else 1
                assert waiting <= ways * (len(assigned) - stage)


@given(assignments(), st.data())
def test_units_that_are_computed_are_not_computed_again(assigned: Sequence[Sequence[Sequence[int]]], data: st.DataObject) -> None:
    """The others need what those have given, and no rank waits for ever."""
    done = [data.draw(st.sets(st.sampled_from(sorted(shard for shards in column for shard in shards)))) for column in assigned]
    left = [[[shard for shard in shards if shard not in over] for shards in column] for column, over in zip(assigned, done, strict=True)]
    found = order(left, done)
    for column, turns_of in zip(left, found.turns, strict=True):
        for shards, turns in zip(column, turns_of, strict=True):
            assert sorted(turns) == sorted(UnitHalf(half, shard) for half in Half for shard in shards)
    given_again = {(stage, UnitHalf(half, shard)) for stage, over in enumerate(done) for shard in over for half in Half}
    assert len(carried_out(found, given_again)) == len(given_again) + sum(len(turns) for column in found.turns for turns in column)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 3))
def test_with_as_many_ranks_in_each_stage_the_bubble_is_that_of_the_law(stages: int, shards: int, replicas: int) -> None:
    ranges = [(replica * shards, (replica + 1) * shards) for replica in range(replicas)]
    column = [list(range(*one)) for one in ranges]
    ticks = order([column] * stages).ticks
    assert 1 - shards * TICKS / ticks == pytest.approx(pipeline_bubble(stages, shards))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
@pytest.mark.parametrize("each", [8, 16])
def test_where_a_rank_is_lost_the_step_is_longer_by_its_siblings_units_alone(stages: int, replicas: int, each: int) -> None:
    """Its siblings share out its units, and the other stages keep theirs: within 10% of (units of the fullest stage) / (units before)."""
    shards = replicas * each
    whole = [tuple(range(replica * each, (replica + 1) * each)) for replica in range(replicas)]
    cuts = [place * shards // (replicas - 1) for place in range(replicas)]
    fewer = share([()] * (replicas - 1), list(itertools.pairwise(cuts)), shards).assigned
    fullest, before = max(map(len, fewer)), order([whole] * stages).ticks
    for short in range(stages):
        ticks = order([fewer if stage == short else whole for stage in range(stages)]).ticks
        assert ticks / before <= 1.1 * fullest / each


def test_stages_that_compute_other_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="other shards"):
        order([[[0, 1]], [[0]]])
    with pytest.raises(ValueError, match="other shards"):
        order([[[0], [0]], [[0], [0]]])


def test_the_order_of_two_stages_is_1f1b() -> None:
    first, last = order([[[0, 1, 2]]] * 2).turns
    words = ["".join(f"{'FB'[turn.half]}{turn.shard} " for turn in turns) for (turns,) in (first, last)]
    assert words == ["F0 F1 B0 F2 B1 B2 ", "F0 B0 F1 B1 F2 B2 "]
