"""Groups of ranks. Each stays within the narrowest domain that holds it, and a newcomer makes one whole again. Pure.

A group is a run of ``replica_size`` view ranks, such as the ranks that together hold one replica of a model. Ray chooses the node on which
a process starts. This module chooses its rank and group, or that it stands by, and does so again whenever a view changes.

A domain with n ranks holds at most floor(n / size) whole groups. This module groups within the narrowest domains first, and the rest within
the next wider ones. That reaches the bound in every domain at once. The floors of the parts, and of the rests, add up to the floor of the
whole.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fleet.protocol.domains import Crowd, Place, place_of
from fleet.protocol.topology import shared
from fleet.protocol.types import Candidate, Member

Group = tuple[int, ...]
"""Indices of its members."""


def together(places: Sequence[Place], size: int) -> list[Group]:
    """All of ``places``, by index, in groups of ``size``; the rest is a shorter group, the last.

    Args:
        places: of each member, its domains from wide to narrow, then its node.
    """
    pools, found = defaultdict[Place, list[int]](list), list[Group]()
    for index, place in enumerate(places):
        pools[place].append(index)
    for depth in range(max(map(len, places), default=0), -1, -1):
        above = defaultdict[Place, list[int]](list)
        for domain in sorted(pools, key=lambda domain: pools[domain]):
            inside = pools[domain]
            full = len(inside) // size * size if len(domain) == depth else 0  # a place with fewer levels waits for its own
            found += [tuple(inside[start : start + size]) for start in range(0, full, size)]
            above[domain[:-1] if len(domain) == depth else domain] += inside[full:]
        pools = above
    rest = tuple(pools[()])
    return [*found, rest] if rest else found


def whole(places: Sequence[Place], groups: Sequence[Group], size: int) -> tuple[int, ...]:
    """The number of groups within one domain, at each level from none to the narrowest."""
    counts = Counter(len(shared([places[index] for index in group])) for group in groups if len(group) == size)
    depth = max(map(len, places), default=0)
    return tuple(sum(count for level, count in counts.items() if level >= least) for least in range(depth + 1))


# ---- the order of ranks ------------------------------------------------------------------------------------------------------------------


def ordered(candidates: Sequence[Candidate], size: int, *, replicated: bool = True) -> tuple[Member, ...]:
    """The candidates in the order of view ranks. Whole groups stay together, unless others would then lie farther apart than they need.

    A rank that stays in its group keeps its place there, and a newcomer takes the place of the rank that it replaces.

    Args:
        replicated: each rank has the whole state. Else a rank has the part of its place: without groups, too, it keeps its place if it can.
    """
    ranked = sorted(candidates, key=lambda candidate: candidate.member)
    if size == 1:
        return tuple(candidate.member for candidate in (ranked if replicated else _in_group(ranked, len(ranked))))
    places = [_place(candidate) for candidate in ranked]
    best, filled = together(places, size), _filled(ranked, places, size)
    ways = ([*some, *_others(some, places, size)] for some in (filled, [group for group in filled if _stays(group, ranked)]))
    reached = whole(places, best, size)
    chosen = next((way for way in ways if whole(places, way, size) == reached), best)
    groups = sorted(([ranked[index] for index in group] for group in chosen), key=lambda group: _order(group, size))
    return tuple(candidate.member for group in groups for candidate in _in_group(group, size))


def _filled(ranked: Sequence[Candidate], places: Sequence[Place], size: int) -> list[Group]:
    """The groups of the present view, those that lack fewest first. The nearest newcomers make each one whole, if there are enough."""
    before, newcomers = defaultdict[int, list[int]](list), list[int]()
    for index, candidate in enumerate(ranked):
        (before[candidate.view_rank // size] if candidate.view_rank >= 0 else newcomers).append(index)
    found = list[Group]()
    for _, group in sorted(before.items(), key=lambda item: (-len(item[1]), item[0])):
        here = [places[index] for index in group]
        near = sorted(newcomers, key=lambda index: (-len(shared([*here, places[index]])), index))[: size - len(group)]
        if len(group) + len(near) == size:
            found.append((*group, *near))
            newcomers = [index for index in newcomers if index not in near]
    return found


def _stays(group: Group, ranked: Sequence[Candidate]) -> bool:
    """Whether all ranks of the group were in the view before, and none of it is gone."""
    return all(ranked[index].view_rank >= 0 for index in group)


def _others(some: Sequence[Group], places: Sequence[Place], size: int) -> list[Group]:
    """The candidates that are in none of these groups, in groups."""
    inside = {index for group in some for index in group}
    rest = [index for index in range(len(places)) if index not in inside]
    return [tuple(rest[index] for index in group) for group in together([places[index] for index in rest], size)]


def _order(group: Sequence[Candidate], size: int) -> tuple[bool, float, Member]:
    """A shorter group comes last; a group that existed before comes before others."""
    ranks = [candidate.view_rank for candidate in group if candidate.view_rank >= 0]
    return len(group) < size, min(ranks, default=math.inf), min(candidate.member for candidate in group)


def _in_group(group: Sequence[Candidate], size: int) -> list[Candidate]:
    """By the place of each rank in its group. A rank without a place, or with a taken one, gets a free one."""
    by_place, others = dict[int, Candidate](), list[Candidate]()
    for candidate in sorted(group, key=lambda candidate: (candidate.view_rank < 0, candidate.view_rank, candidate.member)):
        place = candidate.view_rank % size
        if candidate.view_rank < 0 or place in by_place:
            others.append(candidate)
        else:
            by_place[place] = candidate
    free = (place for place in range(size) if place not in by_place)
    by_place.update(zip(free, others, strict=False))
    return [by_place[place] for place in sorted(by_place)]


# ---- ranks that train, and spares --------------------------------------------------------------------------------------------------------


def promoted(waiting: Iterable[Candidate], members: Sequence[Candidate], room: int) -> list[Candidate]:
    """Up to ``room`` of ``waiting``, one after the other: of the widest domain with fewest ``members``, down to the node; then by slot.

    Without members there is no distance to keep, and they come by slot.
    """
    left = sorted(waiting, key=lambda candidate: candidate.member)
    if not members:
        return left[: max(0, room)]
    crowd, chosen = Crowd(map(_place, members)), list[Candidate]()
    while left and len(chosen) < room:
        best = min(left, key=lambda candidate: crowd.of(_place(candidate)))
        left.remove(best)
        chosen.append(best)
        crowd.add(_place(best))
    return chosen


def joining(waiting: Sequence[Candidate], members: Sequence[Candidate], room: int, size: int) -> list[Candidate]:
    """Up to ``room`` of ``waiting``: those that make a group whole again in its domain, then whole groups, each in the domain with fewest.

    For groups of one: as :func:`promoted`.
    """
    if size == 1:
        return promoted(waiting, members, room)
    left, chosen = sorted(waiting, key=lambda candidate: candidate.member), list[Candidate]()
    counts = Counter(domain for candidate in members for domain in _domains(candidate))
    crowd = Crowd(map(_place, members))
    while left and len(chosen) < room:
        for candidate in _next(left, counts, crowd, room - len(chosen), size):
            left.remove(candidate)
            chosen.append(candidate)
            counts.update(_domains(candidate))
            crowd.add(_place(candidate))
    return chosen


def _next(left: Sequence[Candidate], counts: Counter[Place], crowd: Crowd, room: int, size: int) -> list[Candidate]:
    """The candidates of ``left`` that make a group whole in the best domain for it; if none do, the candidate farthest from all."""
    there = defaultdict[Place, list[Candidate]](list)
    for candidate in left:
        for domain in _domains(candidate):
            there[domain].append(candidate)
    missing = {domain: size - counts[domain] % size for domain in there if domain}
    possible = [domain for domain, wanted in missing.items() if wanted <= min(room, len(there[domain]))]
    if not possible:
        return [min(left, key=lambda candidate: crowd.of(_place(candidate)))]
    new = {domain: missing[domain] == size for domain in possible}
    best = min(possible, key=lambda domain: (new[domain], -len(domain), missing[domain], crowd.of(domain), there[domain][0].member))
    return there[best][: missing[best]]


def _domains(candidate: Candidate) -> list[Place]:
    place = _place(candidate)
    return [place[:depth] for depth in range(len(place) + 1)]


def _place(candidate: Candidate) -> Place:
    return place_of(candidate.domain, candidate.node)
