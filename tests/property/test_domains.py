"""Failure domains: where nodes lie, how far apart copies are put, and that no order of what is known changes anything but names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.protocol.chunks import guards
from fleet.protocol.domains import Crowd, Place, locate, number, numbered, place_of
from fleet.protocol.types import Candidate, Member
from fleet.settings.run import RunSettings
from policies.placement import copies
from policies.topology import promoted

LEVELS = ("host", "rack", "row")
NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.tuples(NAMES, NAMES)
"""Row and rack: racks of two rows have one name."""


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, str]:
    """Node -> domain path, of up to nine nodes."""
    return {f"n{i}": "/".join(draw(PATHS)) for i in range(draw(st.integers(1, 9)))}


def shared(one: Place, other: Place) -> int:
    """Levels, from the widest on, at which two places are one domain."""
    alike = [a == b for a, b in zip(one, other, strict=False)]
    return alike.index(False) if False in alike else len(alike)


# ---- where a node lies -------------------------------------------------------------------------------------------------------------------


def test_a_path_goes_from_wide_to_narrow_and_a_missing_label_is_the_host() -> None:
    assert locate({"rack": "r7", "row": "2"}, "h1", LEVELS).path == "2/r7/h1"
    found = locate({"rack": "r7"}, "h1", LEVELS)
    assert (found.path, found.missing) == ("h1/r7/h1", ("row",))
    assert locate({}, "h1", ("host",)) == locate({"rack": "r7"}, "h1", ("host",))
    assert locate({"rack": "r7"}, "h1", LEVELS, override="feed-b/r9").path == "feed-b/r9"
    assert place_of("2/r7", "n") == ("2", "r7", "n")
    assert place_of("", "n") == ("n",)


@pytest.mark.parametrize("levels", [(), ("rack", "rack"), ("",), ("a", "b", "c", "d", "e")])
def test_levels_that_mean_nothing_are_refused(levels: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="domains"):
        RunSettings(domains=levels)


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=2, max_size=9))
def test_numbers_of_places_are_apart_where_the_places_are(places: list[Place]) -> None:
    packed = [numbered(number(place, 3), 3) for place in places]
    assert all(shared(a, b) == shared(c, d) for a, c in zip(places, packed, strict=True) for b, d in zip(places, packed, strict=True))
    assert all(number(place, 3) == int(float(number(place, 3))) for place in places), "a float holds it"
    assert number(("node",), 3) != number(("node", "node"), 3)


@given(st.lists(st.tuples(NAMES, NAMES)), st.tuples(NAMES, NAMES))
def test_a_crowd_counts_who_shares_each_domain(places: list[Place], place: Place) -> None:
    counts = [sum(shared(place, other) > level for other in places) for level in range(2)]
    assert list(Crowd(places).of(place)) == [count for count in counts if count]


# ---- copies in memory --------------------------------------------------------------------------------------------------------------------


@given(clusters(), st.integers(1, 3), st.integers(1, 4))
def test_no_two_copies_share_a_domain_while_another_has_room(domains: dict[str, str], per_node: int, wanted: int) -> None:
    """Room: a node that has no copy of the part, and is not where its rank is at home. At each level, within the wider one."""
    homes = [node for node in domains for _ in range(per_node)]
    for home, chosen in zip(homes, copies(homes, domains, wanted), strict=True):
        assert home not in chosen and len(set(chosen)) == len(chosen) == min(wanted, len(domains) - 1)
        for place, node in enumerate(chosen):
            before = [place_of(domains[one]) for one in (home, *chosen[:place], *chosen[:place])]  # a rank's own counts half
            free = [place_of(domains[one]) for one in domains if one != home and one not in chosen[:place]]
            least = min(sum(shared(one, other) > 0 for other in before) for one in free)
            assert sum(shared(place_of(domains[node]), other) > 0 for other in before) == least
            if least == 0:
                continue
            same_width = [one for one in free if sum(shared(one, other) > 0 for other in before) == least]
            assert sum(shared(place_of(domains[node]), o) > 1 for o in before) == min(
                sum(shared(a, o) > 1 for o in before) for a in same_width
            )


@given(clusters(), st.integers(1, 3), st.integers(1, 3))
def test_the_loss_of_a_domain_leaves_a_copy_of_each_part_wherever_that_is_possible(
    domains: dict[str, str], per_node: int, wanted: int
) -> None:  # fmt: skip
    """A part lies with its rank and in the memories that keep it. Two domains are enough; with two copies the rank is not needed."""
    homes = [node for node in domains for _ in range(per_node)]
    rows = {node: place_of(path)[0] for node, path in domains.items()}
    for home, chosen in zip(homes, copies(homes, domains, wanted), strict=True):
        survives = all(any(rows[node] != lost for node in (home, *chosen)) for lost in rows.values())
        assert survives == (len(set(rows.values())) > 1)
        elsewhere = {row for node, row in rows.items() if node != home}
        if wanted > 1 and len(elsewhere) > 1 and len(domains) > 2:
            assert len({rows[node] for node in chosen}) > 1


@given(clusters(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_in_what_order_nodes_were_heard_of_changes_nothing(domains: dict[str, str], wanted: int, random: object) -> None:
    names = list(domains)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert copies(sorted(domains), domains, wanted) == copies(sorted(domains), {name: domains[name] for name in names}, wanted)


# ---- guards of sharded state -------------------------------------------------------------------------------------------------------------


RANKS = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=12)


@given(RANKS, st.integers(0, 3))
def test_guards_are_spread_and_none_keeps_twice_what_is_even(places: list[Place], wanted: int) -> None:
    found = guards(places, wanted)
    for owner, chosen in enumerate(found):
        assert owner not in chosen and len(set(chosen)) == len(chosen) == min(wanted, len(places) - 1)
    loads = Counter(rank for chosen in found for rank in chosen)
    assert max(loads.values(), default=0) <= 2 * wanted


def possible(places: Sequence[Place], wanted: int) -> bool:
    """Whether each chunk can have a guard in another domain, and none keep more than ``2 * wanted``: by augmenting paths."""
    keeps: dict[int, list[int]] = {rank: [] for rank in range(len(places))}

    def assign(owner: int, seen: set[int]) -> bool:
        for rank, place in enumerate(places):
            if place[0] != places[owner][0] and rank not in seen:
                seen.add(rank)
                if len(keeps[rank]) < 2 * wanted:
                    keeps[rank].append(owner)
                    return True
                for other in list(keeps[rank]):
                    if assign(other, seen):
                        keeps[rank].remove(other)
                        keeps[rank].append(owner)
                        return True
        return False

    return all(assign(owner, set()) for owner in range(len(places)))


@given(RANKS, st.integers(1, 3))
def test_the_loss_of_a_domain_leaves_each_chunk_wherever_that_is_possible(places: list[Place], wanted: int) -> None:
    holders = [(owner, *chosen) for owner, chosen in enumerate(guards(places, wanted))]
    rows = {place[0] for place in places}
    survives = all(any(places[rank][0] != lost for rank in held) for lost in rows for held in holders)
    assert survives == possible(places, wanted)


@given(RANKS, st.integers(1, 3), st.permutations(["a", "b", "c"]))
def test_names_of_domains_mean_nothing(places: list[Place], wanted: int, names: list[str]) -> None:
    other = dict(zip(["a", "b", "c"], names, strict=True))
    assert guards(places, wanted) == guards([(other[row], rack) for row, rack in places], wanted)


# ---- spares ------------------------------------------------------------------------------------------------------------------------------


def candidate(slot: int, path: str, in_view: bool = True) -> Candidate:
    return Candidate(Member(slot, 0), f"n{slot}", None, False, in_view, path)


def test_a_spare_of_the_domain_with_fewest_members_is_promoted() -> None:
    members = [candidate(0, "a/1"), candidate(1, "a/2"), candidate(2, "b/1")]
    waiting = [candidate(3, "a/3", False), candidate(4, "b/1", False), candidate(5, "b/2", False)]
    assert [one.member.slot for one in promoted(waiting, members, 1)] == [5], "row b has fewer, and its rack 2 nobody"
    assert [one.member.slot for one in promoted(waiting, members, 2)] == [5, 3], "then both rows have two: rack 3 of row a nobody"
    assert [one.member.slot for one in promoted(waiting, (), 2)] == [3, 4], "nobody to be apart from"
    assert promoted(waiting, members, 0) == []


@given(st.lists(PATHS, min_size=1, max_size=6), st.lists(PATHS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_whoever_is_promoted_shares_its_domain_with_as_few_as_can_be(members: list[Place], waiting: list[Place], random: object) -> None:
    in_view = [candidate(slot, "/".join(path)) for slot, path in enumerate(members)]
    spares = [candidate(10 + slot, "/".join(path), False) for slot, path in enumerate(waiting)]
    first = promoted(spares, in_view, 1)[0]
    row = place_of(first.domain)[0]
    fewest = min(sum(place[0] == other[0] for place in members) for other in waiting)
    assert sum(place[0] == row for place in members) == fewest
    mixed = list(spares)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert promoted(mixed, in_view, 3) == promoted(spares, in_view, 3)
