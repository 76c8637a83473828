"""Members with a coordinate: how they are written, and what the ranks of a column do as if there were no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.rank.membership.process_group import Group
from actors.rank.membership.subgroup import Subgroup
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from fleet.machine.candidates import StateSource
from fleet.machine.views import make_view
from fleet.protocol.duties import Duties
from fleet.protocol.events import EVENTS, Ready
from fleet.protocol.instructions import INSTRUCTIONS, Publish
from fleet.protocol.journal import decode_line, encode_line
from fleet.protocol.records import RECORDS, Spans
from fleet.protocol.types import Coordinate, Member, View, apply_delta, assigned_by_group, groups, view_delta
from fleet.settings.run import RunSettings
from policies.placement import ranges
from tests.unit.test_machine import START, Bench
from tests.unit.test_reduction import with_groups
from tests.unit.test_sharded_engine import SHARDS, STEPS, reshard, take_all, tracked, trained

LEFT: Coordinate = (("tensor", 0),)
RIGHT: Coordinate = (("tensor", 1),)
MEMBERS = tuple(Member(slot, 0, (LEFT, RIGHT)[slot % 2]) for slot in range(4))
"""Two replicas of two coordinates."""


def view_of(*receivers: int, shards: int = SHARDS) -> View:
    split = assigned_by_group(MEMBERS, lambda together: ranges(shards, len(together)))
    return View(1, MEMBERS, split, 0, receivers, START, "")


# ---- on the wire and in the journal ------------------------------------------------------------------------------------------------------


def test_an_empty_coordinate_is_not_written_and_one_that_is_absent_is_empty() -> None:
    assert EVENTS.to_json(Ready(Member(2, 1))) == ["Ready", [2, 1], ""]
    assert EVENTS.decode(b'["Ready", [2, 1], ""]').member.coordinate == ()
    assert EVENTS.decode(b'["Ready", [2, 1, []], ""]').member.coordinate == ()


def test_a_coordinate_comes_back() -> None:
    assert EVENTS.to_json(Ready(MEMBERS[1])) == ["Ready", [1, 0, [["tensor", 1]]], ""]
    again = INSTRUCTIONS.decode(INSTRUCTIONS.encode(Publish(view_of())))
    assert [member.coordinate for member in again.view.members] == [LEFT, RIGHT, LEFT, RIGHT]


@pytest.mark.parametrize("member", [Member(1, 0), MEMBERS[1]])
def test_spans_are_the_same_text_by_the_shorter_way(member: Member) -> None:
    spans = Spans(member, 3, 1, 7, 500, (10, 20, 0), "cxK")
    assert encode_line(spans) == RECORDS.encode(spans) + b"\n"
    again = decode_line(encode_line(spans))
    assert again == spans and isinstance(again, Spans) and again.member.coordinate == member.coordinate


def test_a_member_is_the_same_process_with_or_without() -> None:
    assert Member(1, 0) == MEMBERS[1] and hash(Member(1, 0)) == hash(MEMBERS[1])
    assert view_of().rank_of(Member(3, 0)) == 3
    assert view_of().column_of(Member(3, 0)).members == (MEMBERS[1], MEMBERS[3])


def test_a_delta_brings_the_coordinates_of_newcomers() -> None:
    spare = Member(4, 0, RIGHT)
    base = view_of()
    later = View(2, (*MEMBERS[:3], spare), base.ranges, 0, (3,), START, "")
    again = apply_delta(base, view_delta(base, later))
    assert again == later and again.members[3].coordinate == RIGHT


# ---- what is assigned within a column ----------------------------------------------------------------------------------------------------


def test_a_group_has_one_member_of_each_column() -> None:
    assert groups(MEMBERS) == [(0, 1), (2, 3)] and groups([Member(0, 0), Member(1, 0)]) == [(0,), (1,)]
    assert [view_of().group_of(member) for member in MEMBERS] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    with pytest.raises(ValueError, match="shorter"):
        groups(MEMBERS[:3])


def test_the_coordinator_assigns_shards_to_groups() -> None:
    bench = Bench(world=4)
    bench.start()
    state = bench.machine.state
    view = make_view(state, MEMBERS, StateSource(0, (), START), START)
    assert view.ranges == ((0, 8), (0, 8), (8, 16), (8, 16))
    state.stragglers.speeds = {MEMBERS[3]: 1 / 3}
    view = make_view(state, MEMBERS, StateSource(0, (), START), START)
    assert view.ranges == ((0, 12), (0, 12), (12, 16), (12, 16)), "its group computes fewer shards than the other"


@pytest.mark.parametrize("receivers", [(3,), (2,), (0,), (1, 2), (2, 3)])
@pytest.mark.parametrize("held", [(), (0, 1, 2), (8, 9)])
@pytest.mark.parametrize("spares_newcomers", [False, True])
def test_all_ranks_of_a_group_have_the_same_shards(spares_newcomers: bool, receivers: tuple[int, ...], held: tuple[int, ...]) -> None:
    """Also where some columns have a rank whose state is on its way, and others have none."""
    view, found = view_of(*receivers), []
    for coordinate in (LEFT, RIGHT):
        column = view.column_of(next(member for member in MEMBERS if member.coordinate == coordinate))
        duties = Duties(SHARDS)
        idle = column.idle if spares_newcomers else ()
        duties.join(column, 0, [() if 0 in idle else held, ()], idle)
        found.append(duties.shares)
    assert found[0] == found[1]


@pytest.mark.parametrize(("receivers", "idle"), [((), ()), ((3,), (1,)), ((2,), (1,)), ((2, 3), (1,)), ((0, 3), ())])
def test_a_group_computes_nothing_while_the_state_of_a_member_is_on_its_way(receivers: tuple[int, ...], idle: tuple[int, ...]) -> None:
    """If all groups have such a member, all compute."""
    assert [view_of(*receivers).column_of(member).idle for member in MEMBERS] == [idle] * 4


def steps_in(view: View, whole: Group, sharding: str, ring: Path) -> tuple[str, int]:
    """(digest, bytes of optimizer state) of a rank of a view, which takes steps with the ranks of its column."""
    member, state = view.members[whole.rank], tracked()
    column = view.column_of(member)
    group = Subgroup(whole, [view.rank_of(each) for each in column.members])
    assert column.rank_of(member) == group.rank
    settings = RunSettings(world=len(view.members), shards=SHARDS, optimizer_sharding=sharding)
    train = TrainStep(state, settings, Recorder(ring, 0), 0.5)
    if train.vote.spread:
        if group.rank == column.donor:
            train.begin(START)
        assert reshard(train, whole, view, column=group) == START
    train.join(group, column, group.rank, START, True)
    assert take_all(train, state) == list(range(STEPS))
    values = train.update.optimizers[0].state.values()
    return train.layout.digest(STEPS), sum(value.nbytes for each in values for value in each.values())


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_a_column_takes_the_steps_of_a_run_of_its_size(sharding: str, tmp_path: Path) -> None:
    """Shards, sums, owners and guards are among its ranks alone."""
    plain = trained(sharding, 2, tmp_path)
    found = with_groups(4, lambda whole: steps_in(view_of(2, 3), whole, sharding, tmp_path / f"rank-{whole.rank}"))
    assert found[::2] == found[1::2] == plain
