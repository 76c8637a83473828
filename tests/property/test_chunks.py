"""Chunks tile what they cut, no block is cut, and what one living member holds is found again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.chunks import (
    BLOCK,
    WHOLE,
    Claim,
    bounds,
    chunks_of,
    cut_of,
    guards,
    lost,
    rectangles,
    route,
    runs,
    servers,
    settled,
)
from fleet.protocol.types import StateId

LENGTHS = st.integers(0, 40 * BLOCK)
SIZES = st.integers(1, 9)
NODES = st.lists(st.integers(0, 3), min_size=1, max_size=9)
AT = StateId(2, 7)


@given(LENGTHS, SIZES)
def test_chunks_tile_a_buffer_evenly_in_whole_blocks(length: int, size: int) -> None:
    spans = [bounds(length, (size, index)) for index in range(size)]
    assert [lo for lo, _ in spans] + [length] == [0] + [hi for _, hi in spans]
    assert all(cut % BLOCK == 0 or cut == length for span in spans for cut in span)
    sizes = [hi - lo for lo, hi in spans]
    assert max(sizes) - min(sizes) <= 2 * BLOCK


@given(NODES, st.integers(0, 3))
def test_copies_are_elsewhere_and_evenly_spread(nodes: list[int], copies: int) -> None:
    found = guards([(node,) for node in nodes], copies)
    for owner, chosen in enumerate(found):
        assert owner not in chosen
        assert len(set(chosen)) == len(chosen) == min(copies, len(nodes) - 1)
        if all(2 * nodes.count(node) <= len(nodes) for node in nodes) and copies == 1:
            assert all(nodes[peer] != nodes[owner] for peer in chosen)
    loads = [sum(rank in chosen for chosen in found) for rank in range(len(nodes))]
    assert max(loads) <= max(2 * copies, 1)


@given(LENGTHS, NODES, st.integers(1, 2), st.sets(st.integers(0, 8)), SIZES)
def test_what_a_living_member_holds_is_found(length: int, nodes: list[int], copies: int, dead: set[int], size: int) -> None:
    """After any loss, into any new size: found exactly when one copy lives, wherever it is, and by itself where it can."""
    placed = guards([(node,) for node in nodes], copies)
    held = [cut_of(placed).kept(rank) for rank in range(len(nodes)) if rank not in dead] or [()]
    gone = [index for index in range(len(nodes)) if {index, *placed[index]} <= dead]
    empty = all(lo == hi for lo, hi in (bounds(length, (len(nodes), index)) for index in gone))
    assert (lost(held, length) == []) == empty
    for rank in range(min(size, len(held))):
        stretches = route(held, [(size, rank)], length, rank)
        lo, hi = bounds(length, (size, rank))
        assert [each.lo for each in stretches] + [hi] == [lo] + [each.hi for each in stretches] or lo == hi
        for start, stop, source in stretches:
            covers = [any(a <= start and stop <= b for a, b in (bounds(length, one) for one in chunks)) for chunks in held]
            assert (source < 0 and not any(covers)) or (covers[source] and (source == rank or not covers[rank]))


# ---- groups that keep a replica each -----------------------------------------------------------------------------------------------------


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int, tuple[tuple[int, ...], ...]]:
    """(places, copies, ranks of a group, guards) of a view of up to 14 ranks, of which the last may be no full group."""
    places = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=14))
    copies, size = draw(st.integers(0, 3)), draw(st.integers(2, 5))
    return places, copies, size, guards(places, copies, size)


Grouped = tuple[list[tuple[int, int]], int, int, tuple[tuple[int, ...], ...]]


def full_groups(count: int, size: int) -> list[range]:
    return [range(first, first + size) for first in range(0, count - size + 1, size)]


@given(grouped())
def test_every_full_group_holds_all_chunks_and_each_member_its_share(view: Grouped) -> None:
    places, copies, size, placed = view
    count = len(places)
    groups = full_groups(count, size)
    for group in groups:
        held = [chunk for rank in group for chunk in cut_of(placed).kept(rank)]
        assert {(count, owner) for owner in range(count)} <= set(held)
        if len(groups) > copies:
            shares = [len(cut_of(placed).kept(rank)) for rank in group]
            assert len(held) == count, "none is there twice"
            assert max(shares) == -(-count // size) and max(shares) - min(shares) <= 1


@given(grouped(), st.integers(0, 40 * BLOCK))
def test_what_a_member_of_full_groups_holds_is_one_part_in_their_size(view: Grouped, length: int) -> None:
    """Of the elements, too, but for blocks that are not cut: where all ranks are in full groups, as they are while nobody is lost."""
    places, copies, size, placed = view
    count = len(places)
    if count % size or count // size <= copies:
        return
    for rank in range(count):
        elements = sum(hi - lo for lo, hi in (bounds(length, chunk) for chunk in cut_of(placed).kept(rank)))
        assert elements <= length / size + 2 * BLOCK * (count // size)


@given(grouped())
def test_there_are_as_many_copies_as_asked_for_all_elsewhere(view: Grouped) -> None:
    places, copies, size, placed = view
    count, groups = len(places), len(full_groups(len(places), size))
    for owner, chosen in enumerate(placed):
        due = max(groups - (owner // size < groups), min(copies, count - 1))
        assert owner not in chosen and len(chosen) == len(set(chosen)) == due


@given(grouped(), st.sets(st.integers(0, 13)), LENGTHS)
def test_a_full_group_that_lives_is_enough_and_so_is_a_keeper_of_each_chunk(view: Grouped, dead: set[int], length: int) -> None:
    places, _, size, placed = view
    count = len(places)
    held = [cut_of(placed).kept(rank) for rank in range(count) if rank not in dead] or [()]
    if any(dead.isdisjoint(group) for group in full_groups(count, size)):
        assert not lost(held, length)
    keepers = [{owner, *chosen} for owner, chosen in enumerate(placed)]
    if all(those - dead for those in keepers):
        assert not lost(held, length)


@given(grouped())
def test_with_two_groups_or_a_copy_any_one_rank_may_be_lost(view: Grouped) -> None:
    places, copies, size, placed = view
    count = len(places)
    if len(full_groups(count, size)) < 2 and not copies:
        return
    for gone in range(count) if count > 1 else ():
        assert not lost([cut_of(placed).kept(rank) for rank in range(count) if rank != gone], 40 * BLOCK)


@given(grouped())
def test_who_asks_begins_in_its_own_group_and_a_full_one_has_all(view: Grouped) -> None:
    places, _, size, placed = view
    groups = full_groups(len(places), size)
    for rank in range(len(places)):
        for owner in range(len(places)):
            asked = servers((owner, *placed[owner]), rank, places, size)
            assert set(asked) == {owner, *placed[owner]} and len(asked) == len(set(asked))
            inside = [keeper for keeper in asked if keeper // size == rank // size]
            assert list(asked[: len(inside)]) == inside
            assert inside or rank // size >= len(groups), "a full group has what each of its members asks for"


def test_whoever_makes_no_full_group_asks_who_is_near() -> None:
    """Three groups in three racks, and one rank more, which is in the rack of the second."""
    places = [("a", 0), ("a", 1), ("b", 2), ("b", 3), ("c", 4), ("c", 5), ("b", 6)]
    placed = guards(places, 1, 2)
    assert [servers((owner, *placed[owner]), 6, places, 2)[0] for owner in range(6)] == [2, 3, 2, 3, 2, 3]


def test_groups_of_one_are_none() -> None:
    places = [(rank % 3,) for rank in range(6)]
    assert guards(places, 2, 1) == guards(places, 2)
    keepers = cut_of(guards(places, 2)).keepers[4]
    assert servers(keepers, 1, places, 1) == servers(keepers, 1)


@given(grouped(), LENGTHS)
def test_a_newcomer_takes_what_it_lacks_from_those_who_are_nearest(view: Grouped, length: int) -> None:
    places, _, _, placed = view
    count = len(places)
    held = [cut_of(placed).kept(rank) if rank != count - 1 else () for rank in range(count)]
    for lo, hi, source in route(held, cut_of(placed).kept(count - 1), length, count - 1, places):
        holds = [peer for peer, chunks in enumerate(held) if any(a <= lo and hi <= b for a, b in (bounds(length, one) for one in chunks))]
        levels = {peer: (places[peer][0] == places[-1][0]) + (places[peer] == places[-1]) for peer in holds}
        assert source < 0 if not holds else levels[source] == max(levels.values())


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=20))
def test_chunks_are_told_in_runs(chunks: list[tuple[int, int]]) -> None:
    assert chunks_of(runs(chunks)) == tuple(chunks)


@given(grouped())
def test_what_a_member_keeps_is_told_in_few_runs(view: Grouped) -> None:
    places, copies, _, placed = view
    for rank in range(len(places)):
        assert len(runs(cut_of(placed).kept(rank))) <= 4 + 2 * copies


@pytest.mark.parametrize(
    ("claim", "state"),
    [
        (Claim(AT, chunks=(WHOLE,)), AT),
        (Claim(StateId(2, 6), ready=True, chunks=(WHOLE,)), AT),
        (Claim(StateId(2, 6), ready=False, chunks=(WHOLE,)), None),
        (Claim(StateId(1, 7), ready=True, chunks=(WHOLE,)), None),
        (Claim(StateId(2, 5), ready=True, chunks=(WHOLE,)), None),
        (Claim(StateId(2, 8), ready=True, chunks=(WHOLE,)), None),
        (Claim(None), None),
    ],
)
def test_only_the_target_and_what_is_ready_for_it_count(claim: Claim, state: StateId | None) -> None:
    found = settled([claim], AT)[0]
    assert found.state == state
    assert bool(found.chunks) == (state is not None)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_rectangles_tile_a_stretch(shape: list[int], data: st.DataObject) -> None:
    tensor = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, tensor.size))
    stop = data.draw(st.integers(start, tensor.size))
    found = rectangles(shape, start, stop)
    assert [one.start for one in found] + [stop] == [start] + [one.stop for one in found] or start == stop
    for one in found:
        window = tensor[tuple(slice(at, at + size) for at, size in zip(one.offsets, one.sizes, strict=True))]
        assert window.shape == one.sizes
        assert window.ravel().tolist() == list(range(one.start, one.stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
