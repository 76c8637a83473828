"""Ranks that compute together: which of them make whole groups, and which groups train on. Pure.

A group has one rank at each coordinate of one stage of the model, and is in a view whole or not at all. A stage may have fewer groups
than another, and each has one at least. A rank keeps its coordinate, so a rank of the same one takes the place of a lost member. That is a
spare that was called to it, or one of the rest of another broken group. The members of a group that stays are not mixed with others, as
they have computed the same shards. A new one takes the members that are nearest to each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fleet.protocol.domains import place_of
from fleet.protocol.topology import shared
from fleet.protocol.types import Candidate, Coordinate, Situation, StateId, outnumbered, stage_of

Together = tuple[Candidate, ...]
"""One candidate at each coordinate, in order."""
Columns = dict[Coordinate, list[Candidate]]


def first(situation: Situation, ranked: Sequence[Candidate], holds: Sequence[Candidate]) -> list[Candidate]:
    """Groups that go on at once. Groups with newcomers join beside the next step, unless they are needed now. Empty: a stage has none.

    Args:
        ranked: the candidates, the most wanted first. ``holds``: those with a clean state.
    """
    most = situation.world // len(situation.coordinates)
    stages = by_stage(situation.coordinates)
    every = [whole(_at(ranked, stage), stage, most) for stage in stages]
    known = [whole([one for one in _at(ranked, stage) if one.in_view or one in holds], stage, most) for stage in stages]
    if not all(every):
        return []
    left, there = _members_of(known), _members_of(every)
    enough = all(known) and len(left) >= situation.min_ranks and not outnumbered(len(there) - len(left), len(there))
    return left if situation.replicated and enough and _go_on(left, holds, situation) else there


def _go_on(members: Sequence[Candidate], holds: Sequence[Candidate], situation: Situation) -> bool:
    """Whether each column has a member with the newest state, or one step behind it: that one may have agreed to the step."""
    held = {one.member.coordinate: one.state for one in reversed(members) if one in holds}  # the most wanted come first
    newest = max((state for state in held.values() if state is not None), default=None)
    if newest is None:
        return False
    near = (newest, StateId(newest.history, newest.step - 1))
    return all(held.get(coordinate) in near for coordinate in situation.coordinates)


class _Grown(NamedTuple):
    """One stage's groups: those of the present view, those of them that ``stay``, the ``late`` ones whose nodes go, and those that join.

    ``most``: so many of the present ones stay at most.
    """

    present: list[Together]
    kept: list[Together]
    staying: list[Together]
    late: list[Together]
    joining: list[Together]
    most: int


def grown(situation: Situation, ranked: Sequence[Candidate]) -> tuple[list[Together], list[Together]]:
    """(groups of the present view that stay in the next one, groups that join it). ``ranked``: see :func:`first`."""
    stages = [_grown(situation, _at(ranked, stage), stage) for stage in by_stage(situation.coordinates)]
    too_few = sum(len(_members([*one.kept, *one.joining])) for one in stages) < situation.min_ranks
    found = [_in_the_end(one, all_stay=too_few) for one in stages]
    return [group for staying, _ in found for group in staying], [group for _, joining in found for group in joining]


def _in_the_end(one: _Grown, *, all_stay: bool) -> tuple[list[Together], list[Together]]:
    kept = [*one.staying, *one.late] if all_stay or not one.kept else one.kept
    if not kept:  # one group at least stays, and gives its state to the others
        return one.present, []
    return kept[: one.most], one.joining


def _grown(situation: Situation, ranked: Sequence[Candidate], stage: Sequence[Coordinate]) -> _Grown:
    size = len(situation.coordinates)
    most = situation.world // size
    present = _present(ranked, stage)
    staying = [group for group in present if all(math.isinf(one.goes_in_s) for one in group)]
    going = sorted((group for group in present if group not in staying), key=lambda group: -min(one.goes_in_s for one in group))
    free = [one for one in ranked if math.isinf(one.goes_in_s) and (not one.in_view or any(one in group for group in going))]
    least = max(1, len(present) - _most_that_leave(situation))
    room = int(min(most - len(staying), situation.most // size - least))
    joining = whole(free, stage, room, known=going) if room > 0 and not all(one.in_view for one in free) else []
    taken = _members(joining)
    late = [group for group in going if not any(one in taken for one in group)]
    kept = [*staying, *(group for group in late if min(one.goes_in_s for one in group) > situation.margin_s)]
    return _Grown(present, kept, staying, late, joining, int(max(least, most - len(joining))))


def _most_that_leave(situation: Situation) -> float:
    return situation.may_leave // len(situation.coordinates) if not math.isinf(situation.may_leave) else math.inf


def whole(
    ranked: Sequence[Candidate], coordinates: Sequence[Coordinate], most: int, *, known: Sequence[Together] | None = None
) -> list[Together]:
    """Up to ``most`` groups of these candidates: groups of the present view first, then broken ones with new members, then new ones.

    ``known``: broken groups to make whole again; by default what is left of the present view's.
    """
    columns: Columns = {coordinate: [one for one in ranked if one.member.coordinate == coordinate] for coordinate in coordinates}
    found: list[Together] = []
    if known is None:
        found = _present(ranked, coordinates)[:most]
        for one in _members(found):
            columns[one.member.coordinate].remove(one)
    rests = _rests([one for column in columns.values() for one in column if one.in_view], len(coordinates))
    for rest in [*rests, *([] for _ in ranked)]:
        if len(found) >= most or not all(columns.values()):
            break
        group = _completed([one for one in rest if one in columns[one.member.coordinate]], columns)
        for one in group:
            columns[one.member.coordinate].remove(one)
        found.append(group)
    return found


def in_order(groups: Iterable[Together]) -> list[Candidate]:
    """The members in the order of view ranks, group by group: those of the present view in its order, then new ones by slot."""

    def key(group: Together) -> tuple[float, int]:
        ranks = [one.view_rank for one in group if one.view_rank >= 0]
        return min(ranks, default=math.inf), min(one.member.slot for one in group)

    return _members(sorted(groups, key=key))


def in_groups(chosen: Sequence[Candidate], size: int) -> list[Together]:
    """Inverse of putting groups one after the other."""
    return [tuple(chosen[start : start + size]) for start in range(0, len(chosen), size)]


def lacking(candidates: Sequence[Candidate], coordinates: Sequence[Coordinate]) -> list[Coordinate]:
    """The coordinates that no candidate has."""
    there = {one.member.coordinate for one in candidates}
    return [coordinate for coordinate in coordinates if coordinate not in there]


def by_stage(coordinates: Sequence[Coordinate]) -> list[tuple[Coordinate, ...]]:
    """The coordinates of each stage of the model; of one where it is not cut into stages."""
    found = defaultdict[int, list[Coordinate]](list)
    for coordinate in coordinates:
        found[stage_of(coordinate)].append(coordinate)
    return [tuple(stage) for _, stage in sorted(found.items())]


def _at(ranked: Sequence[Candidate], stage: Sequence[Coordinate]) -> list[Candidate]:
    return [one for one in ranked if one.member.coordinate in stage]


def _members_of(stages: Iterable[Iterable[Together]]) -> list[Candidate]:
    return [one for groups in stages for one in _members(groups)]


def _members(groups: Iterable[Together]) -> list[Candidate]:
    return [one for group in groups for one in group]


def _rests(candidates: Iterable[Candidate], size: int) -> list[list[Candidate]]:
    """The candidates of each group of the present view, the largest rest first."""
    by_group = defaultdict[int, list[Candidate]](list)
    for one in candidates:
        by_group[one.view_rank // size].append(one)
    return [rest for _, rest in sorted(by_group.items(), key=lambda item: (-len(item[1]), item[0]))]


def _present(ranked: Sequence[Candidate], coordinates: Sequence[Coordinate]) -> list[Together]:
    """The whole groups of a stage in the present view, in the order of their most wanted members."""
    size, order = len(coordinates), {id(one): place for place, one in enumerate(ranked)}
    rests = _rests((one for one in ranked if one.in_view), size)
    found = [tuple(sorted(rest, key=lambda one: one.view_rank)) for rest in rests if len(rest) == size]
    return sorted(found, key=lambda group: max(order[id(one)] for one in group))


def _completed(rest: Sequence[Candidate], columns: Columns) -> Together:
    """A group of ``rest`` and, at each other coordinate, of the candidate nearest to it; of equally near ones the most wanted."""
    group = {one.member.coordinate: one for one in rest}
    for coordinate, column in columns.items():
        if coordinate not in group:
            here = [place_of(one.domain, one.node) for one in group.values()]
            group[coordinate] = min(column, key=lambda one: -len(shared([*here, place_of(one.domain, one.node)])) if here else 0)
    return tuple(group[coordinate] for coordinate in columns)
