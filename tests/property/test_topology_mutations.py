"""Each promise of the placement of groups can be broken: a small, wrong change is caught by the check that is there for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from fleet.protocol.domains import Place
from fleet.protocol.types import Candidate, Member
from policies import topology
from policies.topology import promoted
from tests.property.test_topology import candidate, groups_of, most, spot

SEEDS = range(150)
Patch = pytest.MonkeyPatch


def draw(seed: int) -> tuple[list[Place], int]:
    rng = random.Random(seed)
    return [(rng.choice("ab"), rng.choice("rst"), rng.choice("mn")) for _ in range(rng.randint(4, 14))], rng.choice((2, 3))


def reaches(places: Sequence[Place], members: Sequence[Member], size: int) -> bool:
    """Whether no group of this order is split needlessly."""
    at = {member.slot: index for index, member in enumerate(members)}
    groups = [tuple(at[slot] for slot in group) for group in groups_of(tuple(members), size)]
    ranked = [places[member.slot] for member in members]
    return topology.whole(ranked, groups, size) == most(ranked, size)


def split(places: list[Place], size: int, rng: random.Random) -> bool:
    everyone = [candidate(slot, place) for slot, place in enumerate(places)]
    return not reaches(places, topology.ordered(everyone, size), size)


def moved(places: list[Place], size: int, rng: random.Random) -> bool:
    """One is lost and comes back where it was: somebody else has another rank then."""
    first = topology.ordered([candidate(slot, place) for slot, place in enumerate(places)], size)
    lost = rng.choice(first)
    ranked = [candidate(one.slot, places[one.slot], -1 if one == lost else rank, int(one == lost)) for rank, one in enumerate(first)]
    return [one.slot for one in topology.ordered(ranked, size)] != [one.slot for one in first]


def torn(places: list[Place], size: int, rng: random.Random) -> bool:
    """One is lost, and a spare beside it stands in: somebody else has another rank then."""
    first = topology.ordered([candidate(slot, place) for slot, place in enumerate(places)], size)
    lost = rng.choice(first)
    left = [candidate(one.slot, places[one.slot], rank) for rank, one in enumerate(first) if one != lost]
    after = topology.ordered([*left, candidate(99, places[lost.slot])], size)
    return [99 if one == lost else one.slot for one in first] != [one.slot for one in after]


def far(places: list[Place], size: int, rng: random.Random) -> bool:
    """A group lacks one, somebody in its domain waits, and another is taken."""
    half = len(places) // 2
    there = [candidate(slot, place, slot) for slot, place in enumerate(places[:half])]
    waiting = [candidate(100 + slot, place) for slot, place in enumerate(places[half:])]
    spots = [spot(one) for one in there]

    def gain(one: Candidate) -> int:
        after, before = most([*spots, spot(one)], size), most(spots, size)
        return max((depth for depth in range(1, 4) if after[depth] > before[depth]), default=0)

    (chosen,) = topology.joining(waiting, there, 1, size)
    return gain(chosen) < max(map(gain, waiting))


def crowded(places: list[Place], size: int, rng: random.Random) -> bool:
    """At the start, two of four groups in one rack, though there are two racks."""
    even = [("a", rack, f"n{node}") for rack in "rs" for node in range(2) for _ in range(size)]
    chosen = topology.joining([candidate(slot, place) for slot, place in enumerate(even)], [], 2 * size, size)
    return max(Counter(one.domain for one in chosen).values()) > size


def in_the_order_of_slots(patch: Patch) -> None:
    def wrong(places: Sequence[Place], size: int) -> list[tuple[int, ...]]:
        return [tuple(range(len(places)))[start : start + size] for start in range(0, len(places), size)]

    patch.setattr(topology, "together", wrong)


def the_widest_domain_first(patch: Patch) -> None:
    right = topology.together
    patch.setattr(topology, "together", lambda places, size: right([place[:1] for place in places], size))


def what_is_there_stays_however_it_lies(patch: Patch) -> None:
    patch.setattr(topology, "whole", lambda places, groups, size: (0,))


def nobody_stays_in_its_group(patch: Patch) -> None:
    patch.setattr(topology, "_filled", lambda ranked, places, size: [])
    patch.setattr(topology, "_order", lambda group, size: (len(group) < size, min(candidate.member for candidate in group)))


def places_in_a_group_are_assigned_anew(patch: Patch) -> None:
    patch.setattr(topology, "_in_group", lambda group, size: sorted(group, key=lambda one: (-one.member.incarnation, one.member)))


def whoever_is_farthest_joins(patch: Patch) -> None:
    patch.setattr(topology, "joining", lambda waiting, members, room, size: promoted(waiting, members, room))


def whoever_came_first_joins(patch: Patch) -> None:
    patch.setattr(topology, "joining", lambda waiting, members, room, size: sorted(waiting, key=lambda one: one.member)[:room])


Check = Callable[[list[Place], int, random.Random], bool]
MUTATIONS: list[tuple[Callable[[Patch], None], Check]] = [
    (in_the_order_of_slots, split),
    (the_widest_domain_first, split),
    (nobody_stays_in_its_group, torn),
    (places_in_a_group_are_assigned_anew, moved),
    (whoever_is_farthest_joins, far),
    (whoever_came_first_joins, crowded),
]


def caught(check: Check) -> bool:
    return any(check(*draw(seed), random.Random(seed)) for seed in SEEDS)


@pytest.mark.parametrize("check", [split, moved, torn, far, crowded])
def test_the_policy_breaks_no_promise(check: Check) -> None:
    assert not caught(check)


@pytest.mark.parametrize(("mutation", "check"), MUTATIONS, ids=[mutation.__name__ for mutation, _ in MUTATIONS])
def test_a_wrong_change_is_caught(mutation: Callable[[Patch], None], check: Check, monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    assert caught(check)


def test_groups_that_lie_far_apart_are_not_kept_for_being_there(monkeypatch: Patch) -> None:
    """A group that had to span racks is put together again once its rack has room."""

    def order() -> list[int]:
        spots = [("a", "r"), ("a", "s"), ("a", "s")]
        there = [candidate(slot, (*place, "n"), slot) for slot, place in enumerate(spots)]
        back = candidate(3, ("a", "r", "n"))
        return [member.slot for member in topology.ordered([*there, back], 2)]

    assert order() == [0, 3, 1, 2] or order() == [0, 3, 2, 1]
    what_is_there_stays_however_it_lies(monkeypatch)
    assert order() == [0, 1, 2, 3]
