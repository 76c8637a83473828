"""Whatever coordinates members have: each is in one column, and all shards are assigned within each."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.protocol.duties import Duties
from fleet.protocol.types import Coordinate, Member, StateId, View, assigned_by_group, columns
from policies.placement import ranges

SHARDS = 12
unhurried = settings(suppress_health_check=[HealthCheck.too_slow])
"""A machine may be busy with other things."""
COORDINATES: list[Coordinate] = [(("tensor", 0),), (("tensor", 1),), (("stage", 1), ("tensor", 0))]


@st.composite
def views(draw: st.DrawFn, coordinates: tuple[Coordinate, ...] = tuple(COORDINATES)) -> View:
    """Of up to three whole groups, in any order; the donor receives nothing."""
    size, replicas = draw(st.integers(1, len(coordinates))), draw(st.integers(1, 3))
    drawn = draw(st.permutations(coordinates[:size] * replicas))
    members = tuple(Member(slot, 0, coordinate) for slot, coordinate in enumerate(drawn))
    donor = draw(st.integers(0, len(members) - 1))
    receivers = tuple(sorted(draw(st.sets(st.integers(0, len(members) - 1))) - {donor}))
    split = assigned_by_group(members, lambda places: ranges(SHARDS, len(places)))
    return View(3, members, split, donor, receivers, StateId(0, 4), "store:1")


@unhurried
@given(views(((),)))
def test_without_coordinates_a_column_is_the_whole_view(view: View) -> None:
    assert view.ranges == ranges(SHARDS, len(view.members)), "as they were assigned before there were columns"
    for member in view.members:
        column = view.column_of(member)
        for field in dataclasses.fields(column):
            assert getattr(column, field.name) == getattr(view, {"waiting": "receivers"}.get(field.name, field.name))
        assert column.rank_of(member) == view.rank_of(member)


@unhurried
@given(views())
def test_each_member_is_in_one_column_in_the_order_of_the_view(view: View) -> None:
    found = columns(view.members)
    assert sorted(place for places in found.values() for place in places) == list(range(len(view.members)))
    for member in view.members:
        column = view.column_of(member)
        assert {each.coordinate for each in column.members} == {member.coordinate}
        assert [view.rank_of(each) for each in column.members] == list(found[member.coordinate])
        assert [column.members[rank] for rank in column.receivers] == [
            each for each in column.members if view.rank_of(each) in view.receivers
        ]
        others = [each for each in view.members if each not in column.members]
        assert all(column.rank_of(each) == -1 for each in others)


@unhurried
@given(views())
def test_the_donor_of_a_column_holds_the_state_where_one_of_it_does(view: View) -> None:
    for member in view.members:
        column = view.column_of(member)
        donor = column.members[column.donor]
        if view.members[view.donor] in column.members:
            assert donor == view.members[view.donor]
        assert column.donor not in column.receivers or len(column.receivers) == len(column.members)


@unhurried
@given(views(), st.data())
def test_shards_are_assigned_within_each_column(view: View, data: st.DataObject) -> None:
    """Also where some of a step is computed: each column brings each shard once."""
    for places in columns(view.members).values():
        column = view.column_of(view.members[places[0]])
        assert sorted(shard for lo, hi in column.ranges for shard in range(lo, hi)) == list(range(SHARDS))
        held = [data.draw(st.sets(st.integers(0, SHARDS - 1))) if rank not in column.receivers else set() for rank in range(len(places))]
        duties = [Duties(SHARDS) for _ in places]
        for rank, one in enumerate(duties):
            one.join(column, rank, held, column.idle)
        assert sorted(shard for one in duties for shard in one.mine) == list(range(SHARDS))
        assert len({one.shares for one in duties}) == 1, "all assign alike"
        assert {member for one in duties for member in one.had} == set(column.members)
