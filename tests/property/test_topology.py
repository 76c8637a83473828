"""Groups and who joins them: on random topologies no group is split needlessly, nobody is seated twice, and no order of names matters."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fleet.protocol.domains import Place, place_of
from fleet.protocol.types import Candidate, Member, StateId, View, apply_delta, view_delta
from policies.topology import joining, ordered, together, whole

SIZES = st.integers(1, 4)
SITES = st.tuples(st.sampled_from("ab"), st.sampled_from("rst"), st.sampled_from("mn"))
"""Block, rack and node: racks of two blocks have one name, and nodes of two racks."""
PLACES = st.lists(SITES, min_size=1, max_size=14)


def candidate(slot: int, place: Place, rank: int = -1, incarnation: int = 0) -> Candidate:
    block, rack, node = place
    state = StateId(0, 1) if rank >= 0 else None
    return Candidate(Member(slot, incarnation), f"{block}{rack}{node}", state, False, rank >= 0, f"{block}/{rack}", rank)


def spot(one: Candidate) -> Place:
    return place_of(one.domain, one.node)


def most(places: list[Place], size: int) -> tuple[int, ...]:
    """How many whole groups all domains of each level hold at most: what no way to group them can exceed."""
    depth = max(map(len, places))
    counts = [Counter(place[:level] for place in places) for level in range(depth + 1)]
    return tuple(sum(count // size for count in counts[level].values()) for level in range(depth + 1))


def groups_of(members: tuple[Member, ...], size: int) -> list[tuple[int, ...]]:
    slots = [member.slot for member in members]
    return [tuple(slots[start : start + size]) for start in range(0, len(slots), size)]


@given(PLACES, SIZES)
def test_no_group_is_split_needlessly_at_any_level(places: list[Place], size: int) -> None:
    found = together(places, size)
    assert sorted(index for group in found for index in group) == list(range(len(places))), "each is in one group"
    assert [len(group) for group in found[:-1]] == [size] * (len(found) - 1) and 1 <= len(found[-1]) <= size
    assert whole(places, found, size) == most(places, size)


@given(st.lists(SITES, min_size=1, max_size=7), st.integers(2, 3))
def test_the_bound_is_what_the_best_of_all_ways_reaches(places: list[Place], size: int) -> None:
    """So that the test above compares with what can be had, and not with more."""
    every = itertools.permutations(range(len(places)))
    ways = ([order[start : start + size] for start in range(0, len(order), size)] for order in every)
    reached = [whole(places, way, size) for way in ways]
    assert tuple(max(each) for each in zip(*reached, strict=True)) == most(places, size)


@given(PLACES, SIZES, st.data())
def test_after_a_loss_groups_that_are_whole_stay_and_none_is_split_needlessly(places: list[Place], size: int, data: st.DataObject) -> None:
    first = ordered([candidate(slot, place) for slot, place in enumerate(places)], size)
    lost = data.draw(st.sets(st.sampled_from(sorted(first)), max_size=len(first) - 1))
    left = [candidate(one.slot, places[one.slot], rank) for rank, one in enumerate(first) if one not in lost]
    after = ordered(left, size)
    assert sorted(after) == sorted(one.member for one in left)
    slots = {member.slot: index for index, member in enumerate(after)}
    ranked = [places[member.slot] for member in after]
    groups = [tuple(slots[slot] for slot in group) for group in groups_of(after, size)]
    assert whole(ranked, groups, size) == most(ranked, size)
    if not lost:
        assert after == first, "whom nothing happened to keeps its rank"


@given(PLACES, st.integers(2, 4), st.data())
def test_a_replacement_takes_the_place_of_whom_it_stands_in_for(places: list[Place], size: int, data: st.DataObject) -> None:
    """Where it is in the same domain: then all others are the ranks that they were."""
    first = ordered([candidate(slot, place) for slot, place in enumerate(places)], size)
    lost = data.draw(st.sampled_from(sorted(first)))
    after = [candidate(one.slot, places[one.slot], rank, int(one == lost)) for rank, one in enumerate(first)]
    back = [one if one.member.slot != lost.slot else candidate(lost.slot, places[lost.slot], -1, 1) for one in after]
    found = ordered(back, size)
    assert [member.slot for member in found] == [member.slot for member in first]


@given(PLACES, st.data())
def test_where_each_rank_has_a_part_the_others_keep_theirs(places: list[Place], data: st.DataObject) -> None:
    """Without groups: newcomers, whatever their slots, take the places of those that are gone."""
    first = [candidate(slot, place, slot) for slot, place in enumerate(places)]
    lost = data.draw(st.sets(st.sampled_from(range(len(first)))))
    spares = [candidate(100 + slot, places[slot]) for slot in lost]
    found = ordered(data.draw(st.permutations([*(one for one in first if one.view_rank not in lost), *spares])), 1, replicated=False)
    assert len(found) == len(set(found)) == len(first)
    assert all(found[one.view_rank] == one.member for one in first if one.view_rank not in lost)


@given(PLACES, PLACES, st.integers(2, 3), st.integers(0, 8), st.randoms(use_true_random=False))
def test_who_joins_is_there_once_and_the_order_of_hearing_changes_nothing(
    members: list[Place], waiting: list[Place], size: int, room: int, random: object
) -> None:  # fmt: skip
    there = [candidate(slot, place, slot) for slot, place in enumerate(members)]
    spares = [candidate(100 + slot, place) for slot, place in enumerate(waiting)]
    found = joining(spares, there, room, size)
    assert len(found) == len({one.member for one in found}) == min(room, len(spares))
    mixed = list(spares)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert joining(mixed, there, room, size) == found
    assert ordered([*there, *mixed], size) == ordered([*there, *spares], size)


@given(PLACES, PLACES, st.integers(2, 3))
def test_a_group_that_lacks_one_gets_it_from_its_own_domain(members: list[Place], waiting: list[Place], size: int) -> None:
    """With room for one: if anybody who waits makes a group whole in a domain, whoever joins does, in the narrowest such."""
    there = [candidate(slot, place, slot) for slot, place in enumerate(members)]
    spares = [candidate(100 + slot, place) for slot, place in enumerate(waiting)]
    spots = [spot(one) for one in there]
    before = most(spots, size)

    def gains(place: Place) -> list[bool]:
        return [after > had for after, had in zip(most([*spots, place], size), before, strict=True)][:0:-1]

    (joined,) = joining(spares, there, 1, size)
    depths = [gains(spot(one)).index(True) for one in spares if True in gains(spot(one))]
    if depths:
        assert gains(spot(joined)).index(True) == min(depths)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 3), st.integers(0, 4))
def test_at_the_start_groups_are_whole_and_spread_over_racks(racks: int, per_rack: int, size: int, spares: int) -> None:
    """Each rack holds ``per_rack`` groups, and some racks spares: as many groups as there is room for, whole, no rack with two more."""
    places = [("a", f"r{rack}", f"n{i // size}") for rack in range(racks) for i in range(per_rack * size)]
    everyone = [candidate(slot, place) for slot, place in enumerate(places)]
    wanted = max(1, racks * per_rack - spares) * size
    chosen = joining(everyone, [], wanted, size)
    by_node = Counter(spot(one) for one in chosen)
    assert all(count % size == 0 for count in by_node.values()), "no group is split"
    by_rack = Counter(one.domain for one in chosen)
    loads = [by_rack.get(f"a/r{rack}", 0) for rack in range(racks)]
    assert max(loads) - min(loads) <= size, "groups are replicas of each other: apart"


@given(st.permutations(list(range(6))), st.sets(st.integers(0, 5)), st.sets(st.integers(6, 9)), st.randoms(use_true_random=False))
def test_a_delta_carries_members_that_change_places(order: list[int], lost: set[int], new: set[int], random: object) -> None:
    base = [Member(slot, 0) for slot in order]
    then = [*(member for member in base if member.slot not in lost), *(Member(slot, 0) for slot in sorted(new))]
    random.shuffle(then)  # type: ignore[attr-defined]
    one, other = (View(n, tuple(members), (), 0, (), StateId(0, 1), "s") for n, members in ((1, base), (2, then)))
    assert apply_delta(one, view_delta(one, other)) == other
