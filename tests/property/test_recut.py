"""From the chunks that ranks hold to those that they are to keep: what moves is what they lack, once, and from ranks that have it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.chunks import BLOCK, WHOLE, Claim, StateCut, bounds, cut_of, guards, inherited, lost
from fleet.protocol.recut import ELEMENT_BYTES, FIRST_BYTES_PER_S, LEAST_STEP_S, SLICES, Recut, first_elements

EXTENTS = st.lists(st.integers(0, 60 * BLOCK), min_size=1, max_size=3)


@st.composite
def views(draw: st.DrawFn) -> tuple[StateCut, StateCut | None, StateCut, int]:
    """(the cut of a view, the one with which its survivors go on, the one that they are to have, how many ranks they are)."""
    before, copies, groups = draw(st.integers(1, 9)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    cut = cut_of(guards([(rank % 3,) for rank in range(before)], copies, groups))
    dead = draw(st.sets(st.integers(0, before - 1), max_size=2))
    newcomers = draw(st.integers(0, 2))
    held = [cut.kept(rank) for rank in range(before) if rank not in dead] + [()] * newcomers
    held = draw(st.permutations(held or [()]))
    wanted = cut_of(guards([(rank % 2,) for rank in range(len(held))], copies, groups))
    return cut, inherited(held), wanted, len(held)


@given(st.integers(1, 9), st.integers(0, 3), st.sets(st.integers(0, 8), max_size=3), EXTENTS)
def test_survivors_go_on_with_their_chunks_where_each_has_a_keeper(size: int, copies: int, dead: set[int], extents: list[int]) -> None:
    cut = cut_of(guards([(rank % 3,) for rank in range(size)], copies))
    held = [cut.kept(rank) for rank in range(size) if rank not in dead]
    found = inherited(held)
    if found is None:
        assert any(set(keepers) <= dead for keepers in cut.keepers)
        return
    assert found.size == size and not any(lost(held, extent) for extent in extents)
    assert [set(found.kept(rank)) for rank in range(len(held))] == [set(chunks) for chunks in held], "no more, and no less"


@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 8))
def test_owners_are_spread_over_the_keepers(size: int, copies: int, gone: int) -> None:
    """After one loss no rank owns more than two chunks, and all but one own one."""
    cut = cut_of(guards([(rank,) for rank in range(size)], copies))
    found = inherited([cut.kept(rank) for rank in range(size) if rank != gone % size])
    assert found is not None
    owned = sorted(len(found.owned(rank)) for rank in range(size - 1))
    assert sum(owned) == size and owned[-1] <= 2


def test_chunks_of_a_move_that_was_cut_short_do_not_count() -> None:
    """Some have the chunks of three ranks, some those of two; nobody has the third of three."""
    held = [((3, 0), (2, 0)), ((3, 1), (2, 1)), ((2, 0),)]
    assert inherited(held) == StateCut(((0, 2), (1,)))
    assert inherited([((3, 0),), ((3, 1),)]) is None
    assert inherited([(), ()]) is None
    assert inherited([(WHOLE,), ()]) == StateCut(((0,),))


@given(views(), EXTENTS, st.integers(1, 7), st.data())
def test_every_rank_gets_what_it_lacks_once(
    view: tuple[StateCut, StateCut | None, StateCut, int], extents: list[int], slices: int, data: st.DataObject
) -> None:
    _, now, wanted, ranks = view
    if now is None:
        return
    recut = Recut(now, wanted, ranks, extents, slices=slices, first=data.draw(st.integers(1, 40 * BLOCK)))
    has = [_elements(now.kept(rank), extents) for rank in range(ranks)]
    first = [set(one) for one in has]
    while not recut.over:
        assert recut.begin()
        for rank in range(ranks):
            for flat, (lo, hi, source) in recut.under_way(rank):
                blocks = _blocks(flat, lo, hi)
                assert lo < hi and source != rank
                assert blocks <= first[source], "it comes from a rank that has it in its chunks, and gets its gradients"
                assert not blocks & has[rank], "nothing comes twice"
                has[rank] |= blocks
        recut.end(late=data.draw(st.booleans()))
        for rank in range(ranks):
            there = set[tuple[int, int]]().union(*(_blocks(flat, lo, hi) for flat, (lo, hi, _) in recut.in_place(rank)))
            assert first[rank] | there == has[rank]
            assert _elements(recut.claimed(rank), extents) <= has[rank]
    assert not recut.begin()
    for rank in range(ranks):
        assert _elements(wanted.kept(rank), extents) <= has[rank]
        assert _elements(recut.claimed(rank), extents) == _elements(wanted.kept(rank), extents)


def _elements(chunks: tuple[tuple[int, int], ...], extents: list[int]) -> set[tuple[int, int]]:
    """The blocks of ``chunks``, as (flat buffer, number)."""
    return {one for chunk in chunks for flat, extent in enumerate(extents) for one in _blocks(flat, *bounds(extent, chunk))}


def _blocks(flat: int, lo: int, hi: int) -> set[tuple[int, int]]:
    return {(flat, block) for block in range(lo // BLOCK, -(-hi // BLOCK))} if lo < hi else set()


def test_the_first_slices_are_few_and_then_twice_as_many_while_they_come_in_time() -> None:
    now, wanted = cut_of(guards([(0,), (1,), (2,)], 1)), cut_of(guards([(0,), (1,), (2,)], 2))
    recut = Recut(now, wanted, 3, [3 * 16 * BLOCK], first=BLOCK)
    took = []
    for late in (False, False, True, False, False):
        recut.begin()
        took.append(recut.coming)
        recut.end(late=late)
    assert took == [SLICES // 16, SLICES // 8, SLICES // 4, SLICES // 8, SLICES // 4]


def test_a_rank_receives_beside_its_first_step_what_a_slow_link_carries() -> None:
    claims = [Claim(None), Claim(None, pace_s=2.0), Claim(None, pace_s=1.6)]
    assert first_elements(claims) == int(1.6 * FIRST_BYTES_PER_S / ELEMENT_BYTES)
    assert first_elements(claims[:1]) == int(LEAST_STEP_S * FIRST_BYTES_PER_S / ELEMENT_BYTES)


def test_what_has_the_fewest_copies_comes_first() -> None:
    """Of a chunk that lies over two of the chunks before, of which one has lost a keeper."""
    found = []
    for size, gone, copies in itertools.product(range(3, 9), range(3), (1, 2)):
        length, cut = size * (size - 1) * 64 * BLOCK, cut_of(guards([(rank,) for rank in range(size)], copies))
        now = inherited([cut.kept(rank) for rank in range(size) if rank != gone])
        assert now is not None
        recut = Recut(now, cut_of(guards([(rank,) for rank in range(size - 1)], copies)), size - 1, [length], first=1)
        came: dict[tuple[int, int], list[int]] = {}
        while recut.begin():
            for rank in range(size - 1):
                for _, (lo, _, _) in recut.under_way(rank):
                    came.setdefault((rank, (size - 1) * lo // length), []).append(len(now.keepers[size * lo // length]))
            recut.end(late=True)
        found += list(came.values())
    falls = [sum(after < before for before, after in itertools.pairwise(copies)) for copies in found]
    assert max(falls) <= 1, "a slice that lies over both comes with the first ones"
    assert any(len(set(copies)) == 2 for copies in found)


def test_each_rank_knows_what_it_gives_without_a_look_at_all_others() -> None:
    cut = cut_of(guards([(rank,) for rank in range(6)], 1))
    now = inherited([cut.kept(rank) for rank in range(5)])
    assert now is not None
    recut = Recut(now, cut_of(guards([(rank,) for rank in range(5)], 1)), 5, [60 * BLOCK, 7 * BLOCK], first=10 * BLOCK)
    recut.begin()
    for rank, source in itertools.product(range(5), range(5)):
        assert recut.under_way(rank, source) == [one for one in recut.under_way(rank) if one[1].source == source]


def test_where_nothing_is_missing_one_step_is_enough() -> None:
    """Two ranks have all of three, and one is to have the whole."""
    recut = Recut(StateCut(((0,), (0,), (0,))), StateCut(((0,),)), 1, [50 * BLOCK], first=1)
    assert recut.begin() and recut.under_way(0) == []
    recut.end(late=False)
    assert recut.over


def test_a_rank_is_served_by_one_that_is_near() -> None:
    now, wanted = StateCut(((0, 1, 2),)), StateCut(((0, 1, 2, 3),))
    places = [("a",), ("b",), ("b",), ("b",)]
    recut = Recut(now, wanted, 4, [8 * BLOCK], places, first=1)
    recut.begin()
    assert {one.source for _, one in recut.under_way(3)} <= {1, 2}
