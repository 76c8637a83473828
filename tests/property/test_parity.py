"""Families and their parity: who keeps what, at any number of ranks, and what can be made of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.chunks import BLOCK, Claim, Kin, bounds, lost, settled
from fleet.protocol.parity import endangered, families, family_of, revivals, stripe, with_revived
from fleet.protocol.types import StateId

sizes, parities = st.integers(1, 40), st.integers(1, 15)
EXTENTS = (5 * BLOCK, 977 * BLOCK + 64, 64)
HERE = StateId(0, 7)


def places(size: int, hosts: int) -> list[tuple[str, ...]]:
    return [(f"rack-{rank % hosts % 2}", f"host-{rank % hosts}", f"node-{rank % hosts}") for rank in range(size)]


def claims(size: int, parity: int, state: StateId = HERE) -> list[Claim]:
    dealt = families(places(size, 5), parity)
    return [
        Claim(state, chunks=((size, rank),), kin=(Kin(3, size, mine, mine.index(rank), state.step),))
        for rank in range(size)
        for mine in [family_of(dealt, rank)]
    ]


@given(sizes, parities, st.integers(1, 12))
def test_each_rank_is_in_one_family_and_domains_are_spread_over_them(size: int, parity: int, hosts: int) -> None:
    where = places(size, hosts)
    dealt = families(where, parity)
    assert sorted(rank for members in dealt for rank in members) == list(range(size))
    lengths = [len(members) for members in dealt]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) > 1 or size == 1
    assert max(lengths) <= parity + 1 or (parity, size % 2, max(lengths)) == (1, 1, 3)
    for level in (1, 2):
        for domain in {place[:level] for place in where}:
            inside = sum(place[:level] == domain for place in where)
            assert max(sum(where[rank][:level] == domain for rank in members) for members in dealt) == -(-inside // len(dealt))


@given(st.integers(2, 40), parities)
def test_the_stripes_of_a_chunk_are_the_chunk_and_each_other_member_keeps_one(size: int, parity: int) -> None:
    for members in families(places(size, 5), parity):
        everyone = range(len(members))
        for owner in everyone:
            kept = [stripe(size, members, owner, keeper) for keeper in everyone if keeper != owner]
            for extent in EXTENTS:
                spans = sorted(bounds(extent, one) for one in kept)
                lo, hi = bounds(extent, (size, members[owner]))
                assert (spans[0][0], spans[-1][1]) == (lo, hi)
                assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))


@given(st.integers(2, 30), parities, st.data())
def test_one_of_each_family_can_be_lost_together_and_two_of_one_cannot(size: int, parity: int, data: st.DataObject) -> None:
    dealt = families(places(size, 5), parity)
    gone = {data.draw(st.sampled_from(members)) for members in dealt}
    there = [claim if rank not in gone else Claim(None) for rank, claim in enumerate(claims(size, parity))]
    made = revivals(there, HERE, EXTENTS)
    held = [claim.chunks for claim in with_revived(settled(there, HERE), made)]
    assert not any(lost(held, extent) for extent in EXTENTS)
    assert not endangered(dealt, [rank in gone for rank in range(size)])
    members = data.draw(st.sampled_from(dealt))
    gone |= set(members[:2])
    there = [claim if rank not in gone else Claim(None) for rank, claim in enumerate(claims(size, parity))]
    made = revivals(there, HERE, EXTENTS)
    assert not any(one.keeper in members for one in made)
    assert endangered(dealt, [rank in gone for rank in range(size)]) == len(gone & set(members))
    held = [claim.chunks for claim in with_revived(settled(there, HERE), made)]
    assert lost(held, EXTENTS[1])


@given(st.integers(2, 30), parities, st.data())
def test_of_a_step_that_some_have_taken_the_keeper_steps_what_had_not_come(size: int, parity: int, data: st.DataObject) -> None:
    """Nothing is made for who was not ready: it holds nothing of the target."""
    victim = data.draw(st.integers(0, size - 1))
    after = StateId(0, 8)
    there = []
    for rank, claim in enumerate(claims(size, parity)):
        taken = data.draw(st.integers(0, 3))
        stepped = replace(claim, state=after, kin=(claim.kin[0]._replace(taken=taken),))
        there.append(Claim(None) if rank == victim else stepped if data.draw(st.booleans()) else replace(claim, ready=True))
    if all(claim.state != after for claim in there):
        return
    made = revivals(there, after, EXTENTS)
    held = [claim.chunks for claim in with_revived(settled(there, after), made)]
    assert not any(lost(held, extent) for extent in EXTENTS)
    assert all(one.taken == there[one.keeper].kin[0].taken for one in made)
    behind = next(rank for rank in range(size) if rank != victim)
    others = [replace(claim, ready=False, state=HERE) if rank == behind else claim for rank, claim in enumerate(there)]
    if victim in family_of(families(places(size, 5), parity), behind):
        assert not revivals(others, after, EXTENTS)
