"""Whatever is held when a view changes: each shard counts once, every rank has work, and nothing is computed twice without need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.shards import blocks, cover, share, tree
from policies.placement import ranges


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, int, list[set[int]]]:
    """(shards, ranks, what each rank holds); ranks may hold the same shard, as one that was left out of a view and came back would."""
    shards = draw(st.integers(1, 40))
    ranks = draw(st.integers(1, min(shards, 9)))
    held = [draw(st.sets(st.integers(0, shards - 1))) for _ in range(ranks)]
    return shards, ranks, held


@given(situations())
def test_each_shard_counts_once_and_every_rank_brings_something(situation: tuple[int, int, list[set[int]]]) -> None:
    shards, ranks, held = situation
    found = share(held, ranges(shards, ranks), shards)
    contributed = [shard for rank in range(ranks) for lo, hi in found.kept[rank] for shard in range(lo, hi)]
    contributed += [shard for assigned in found.assigned for shard in assigned]
    assert sorted(contributed) == list(range(shards))
    assert all(kept or assigned for kept, assigned in zip(found.kept, found.assigned, strict=True))
    for rank in range(ranks):
        assert set(found.kept[rank]) <= set(cover(held[rank], shards))
    leaves = [block for of_one in found.leaves(shards) for block in of_one]
    assert sorted(shard for lo, hi in leaves for shard in range(lo, hi)) == list(range(shards))
    assert set(leaves) <= tree(shards)


@given(situations(), st.integers(1, 3))
def test_a_rank_without_a_range_takes_no_sum_from_another(situation: tuple[int, int, list[set[int]]], spares: int) -> None:
    """A spare of a sharded run computes lost shards alone, and nothing where all are held."""
    shards, ranks, held = situation
    spans = (*ranges(shards, ranks), *((shards, shards),) * spares)
    found = share([*held, *([set()] * spares)], spans, shards)
    contributed = [shard for kept in found.kept for block in kept for shard in range(*block)]
    contributed += [shard for assigned in found.assigned for shard in assigned]
    assert sorted(contributed) == list(range(shards))
    whole = share([set(range(lo, hi)) for lo, hi in spans], spans, shards)
    assert not any(whole.assigned) and all(whole.kept[:ranks]) and not any(whole.kept[ranks:])
    assert share([()] * len(spans), spans, shards).assigned[ranks:] == ((),) * spares


@given(situations())
def test_survivors_of_one_view_keep_all_they_hold(situation: tuple[int, int, list[set[int]]]) -> None:
    """Of ranges that tile the shards, some are lost and their ranks replaced: only what they held is dealt again, evenly."""
    shards, ranks, marks = situation
    plan = ranges(shards, ranks)
    lost = {rank for rank in range(ranks) if len(marks[rank]) % 2}
    held = [set() if rank in lost else set(range(*plan[rank])) for rank in range(ranks)]
    if not any(held):
        return
    found = share(held, plan, shards)
    missing = sum(hi - lo for rank, (lo, hi) in enumerate(plan) if rank in lost)
    assert sum(map(len, found.assigned)) == missing
    assert max(map(len, found.assigned)) <= -(-missing // ranks)


@given(situations(), st.data())
def test_newcomers_bring_nothing_and_the_others_everything(situation: tuple[int, int, list[set[int]]], data: st.DataObject) -> None:
    shards, ranks, held = situation
    idle = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks // 2))
    held = [set() if rank in idle else held[rank] for rank in range(ranks)]
    found = share(held, ranges(shards, ranks), shards, idle)
    leaves = found.leaves(shards)
    assert [rank for rank in range(ranks) if not leaves[rank]] == sorted(idle)
    assert sorted(shard for of_one in leaves for lo, hi in of_one for shard in range(lo, hi)) == list(range(shards))
    sizes = [len(assigned) for rank, assigned in enumerate(found.assigned) if rank not in idle]
    assert any(held) or max(sizes) - min(sizes) <= -(-shards // ranks)


@given(situations(), st.data())
def test_who_gives_its_state_away_computes_no_more_than_others_that_hold_as_much(
    situation: tuple[int, int, list[set[int]]], data: st.DataObject
) -> None:
    shards, ranks, held = situation
    giver = data.draw(st.integers(0, ranks - 1))
    idle = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks // 2)) - {giver}
    held = [set() if rank in idle else held[rank] for rank in range(ranks)]
    if not any(held):
        return
    found = share(held, ranges(shards, ranks), shards, idle, giver)
    kept = [sum(hi - lo for lo, hi in blocks_of_one) for blocks_of_one in found.kept]
    alike = [len(assigned) for rank, assigned in enumerate(found.assigned) if rank not in idle and kept[rank] == kept[giver]]
    assert len(found.assigned[giver]) == min(alike)


@given(st.integers(1, 64), st.data())
def test_a_range_is_covered_by_its_blocks(shards: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, shards - 1))
    stop = data.draw(st.integers(start + 1, shards))
    assert cover(range(start, stop), shards) == blocks(start, stop, shards)


def test_without_anything_held_the_ranges_stand() -> None:
    found = share([set(), set()], [(0, 4), (4, 6)], 6)
    assert found.assigned == ((0, 1, 2, 3), (4, 5))
    assert found.kept == ((), ())


def test_a_newcomer_without_work_takes_the_smallest_sum() -> None:
    """3 ranks hold all 4 shards; the fourth has nothing to do until one of two shards is given up."""
    found = share([{0, 1}, {2}, {3}, set()], [(0, 1), (1, 2), (2, 3), (3, 4)], 4)
    assert found.kept == ((), ((2, 3),), ((3, 4),), ())
    assert found.assigned == ((0,), (), (), (1,))
