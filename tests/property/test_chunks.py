"""Chunks tile what they cut, no block is cut, and what one living member holds is found again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.chunks import BLOCK, WHOLE, Claim, bounds, guards, kept, lost, rectangles, route, settled
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
    held = [kept(placed, rank) for rank in range(len(nodes)) if rank not in dead] or [()]
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
