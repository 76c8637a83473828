"""Groups of ranks that compute a shard together: which ranks make one, which go on, and which coordinate a process gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.settings import parse_chaos
from fleet.app.plans import check
from fleet.errors import ConfigError
from fleet.ledger.tallies import Tally
from fleet.protocol.causes import ProcessEnded
from fleet.protocol.decisions import Called
from fleet.protocol.events import NodeLeaves, ProcessLost, Ready, SettingChanged, Tick
from fleet.protocol.instructions import Propose, Publish, Welcome, Write
from fleet.protocol.records import DecisionMade, HistoryBegun
from fleet.protocol.types import Candidate, Coordinate, Member, Process, Situation, StateId, groups
from fleet.settings.run import Budgets, RunSettings, VerifySettings
from policies.recovery import SETTLE_S, ReformPromoteRegrow
from tests.unit.test_machine import STEP_3, Bench, hello, only

LEFT: Coordinate = (("tensor", 0),)
RIGHT: Coordinate = (("tensor", 1),)
BOTH = (LEFT, RIGHT)
POLICY = ReformPromoteRegrow(Budgets(slot=4, total=8), start_s=60.0)


def candidate(
    slot: int, rank: int = -1, step: int | None = 5, *, at: Coordinate | None = None, dirty: bool = False, node: str = ""
) -> Candidate:
    """``rank``: in the present view, or -1. A slot has its own coordinate, unless it is ``at`` another one."""
    state = None if step is None else StateId(0, step)
    member = Member(slot, 0, BOTH[slot % 2] if at is None else at)
    return Candidate(member, node or f"n{slot // 2}", state, dirty, rank >= 0, view_rank=rank)


def situation(*candidates: Candidate, world: int = 4, min_ranks: int = 1, **more: Any) -> Situation:
    return dataclasses.replace(Situation(candidates, world, min_ranks, 0.0, 0, None), coordinates=BOTH, most=16, **more)


def slots(members: tuple[Member, ...]) -> list[int]:
    return [member.slot for member in members]


def test_the_first_view_has_a_group_for_each_replica() -> None:
    fresh = [candidate(slot, step=None) for slot in (3, 2, 1, 0)]
    assert slots(POLICY.form(situation(*fresh), 60.0).members) == [0, 1, 2, 3]


def test_a_group_that_lost_a_member_is_out_and_the_others_go_on() -> None:
    assert slots(POLICY.form(situation(candidate(0, 0), candidate(2, 2), candidate(3, 3)), 0.0).members) == [2, 3]


def test_the_rests_of_two_groups_are_a_group() -> None:
    assert slots(POLICY.form(situation(candidate(0, 0), candidate(3, 3)), 0.0).members) == [0, 3]


def test_two_of_one_coordinate_are_none() -> None:
    decision = POLICY.form(situation(candidate(0, 0), candidate(2, 2)), 1e9).decision
    assert decision.action == "wait"
    assert "none at tensor=1" in decision.reason


def test_a_newcomer_joins_with_the_rest_of_a_group_behind_the_next_step() -> None:
    there = situation(candidate(0), candidate(2, 0), candidate(3, 1), candidate(5, step=None))
    assert slots(POLICY.form(there, 0.0).members) == [2, 3], "they do not wait"
    grown = POLICY.grow(there, SETTLE_S)
    assert (grown.decision.action, slots(grown.members)) == ("grow", [2, 3, 0, 5])


def test_nobody_joins_alone() -> None:
    there = situation(candidate(2, 0), candidate(3, 1), candidate(5, step=None))
    assert POLICY.grow(there, SETTLE_S).decision.action == "wait"


def test_a_newcomer_that_is_needed_now_is_in_the_next_view() -> None:
    """One replica, or a column that nobody else is of."""
    alone = situation(candidate(0, 0), candidate(1, step=None), world=2)
    assert slots(POLICY.form(alone, 0.0).members) == [0, 1]
    column = situation(candidate(0, 0), candidate(2, 2), candidate(1, step=None), candidate(3, step=None))
    assert slots(POLICY.form(column, 0.0).members) == [0, 1, 2, 3]


def test_a_member_one_step_behind_has_what_it_needs_and_one_that_is_dirty_has_not() -> None:
    """Then a newcomer does not come at once, and here it does: from the rank at the new one all columns have a state."""
    newcomers = (candidate(4, step=None), candidate(5, step=None))
    behind = situation(candidate(0, 0, 6), candidate(1, 1, 5), *newcomers)
    assert slots(POLICY.form(behind, 0.0).members) == [0, 1]
    older = situation(candidate(0, 0, 7), candidate(1, 1, 5), *newcomers)
    assert slots(POLICY.form(older, 0.0).members) == [0, 1, 4, 5], "a new history begins: all are there for it"


def test_the_nearest_one_takes_the_place() -> None:
    """Of two newcomers that are equal otherwise: the one on the node of the rest of the group."""
    there = situation(
        candidate(0, node="here"), candidate(2, 0), candidate(3, 1), candidate(5, step=None, node="there"),
        candidate(7, step=None, node="here"),
    )  # fmt: skip
    assert slots(POLICY.grow(there, SETTLE_S).members) == [2, 3, 0, 7]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from((None, 4, 5)), st.booleans()), min_size=8, max_size=8))
def test_each_group_of_any_view_is_whole(found: list[tuple[bool, bool, int | None, bool]]) -> None:
    there = [
        candidate(slot, slot if here and slot < 4 else -1, step, dirty=dirty and step is not None)
        for slot, (alive, here, step, dirty) in enumerate(found)
        if alive
    ]
    for formation in (POLICY.form(situation(*there), 1e9), POLICY.grow(situation(*there), 1e9)):
        members = formation.members
        assert len(set(members)) == len(members) <= 4
        for together in groups(members):
            assert [members[rank].coordinate for rank in together] == list(BOTH)


# ---- coordinates of processes ------------------------------------------------------------------------------------------------------------


def started(spares: int = 1, checkpoint: tuple[str, StateId] | None = None, **more: Any) -> Bench:
    made = Bench(world=4, spares=spares, mesh={"tensor": 2}, nodes=2, checkpoint=checkpoint, **more)
    for slot in range(4 + spares):
        made.join(slot)
    if spares:
        made.after(0.1)  # nobody has a coordinate before that
    for rank in made.machine.state.roster.in_order():
        made.send(Ready(rank.member))
    view = only(Publish, made.after(0.1)).view
    made.form(view.members, STEP_3)
    return made


def test_the_ranks_of_a_node_are_whole_groups_and_the_rest_are_spares() -> None:
    """Slots 0, 2 and 4 are on one node, the others on another."""
    made = started()
    assert [rank.member.coordinate for rank in made.machine.state.roster.in_order()] == [LEFT, LEFT, RIGHT, RIGHT, ()]
    assert _groups_of(made) == [[0, 2], [1, 3]]
    assert _groups_of(started(spares=0)) == [[0, 2], [3, 1]]


def _groups_of(made: Bench) -> list[list[int]]:
    view = made.machine.state.view
    assert view is not None
    return [[view.members[rank].slot for rank in together] for together in groups(view.members)]


def _comes(made: Bench, slot: int) -> None:
    """The process of ``slot``, on the first, second or third of three nodes."""
    made.send(dataclasses.replace(hello(slot), process=Process(f"n{slot % 3}", 100 + slot, 1)))


def test_processes_of_three_nodes_come_in_turn_and_no_group_is_on_two_of_them() -> None:
    """Slots 0 and 3 are on one node, 1 and 4 on another, 2 and 5 on a third. The first four to come are of all three."""
    made = Bench(world=4, spares=2, mesh={"tensor": 2}, nodes=3)
    for slot in (2, 1, 0, 4):
        _comes(made, slot)
    made.after(0.1)
    assert {rank.member.slot for rank in made.machine.state.roster.in_order() if rank.member.coordinate} == {1, 4}
    _comes(made, 3)
    made.after(0.1)
    there = made.machine.state.roster.by_slot
    assert [there[slot].member.coordinate for slot in (0, 3, 1, 4, 2)] == [LEFT, RIGHT, LEFT, RIGHT, ()]


def test_a_run_begins_without_a_process_that_does_not_come() -> None:
    """Each node has one rank: no group can be on one node."""
    made = Bench(world=2, spares=1, mesh={"tensor": 2}, nodes=3)
    _comes(made, 0)
    _comes(made, 2)
    made.after(0.1)
    assert not any(rank.member.coordinate for rank in made.machine.state.roster.in_order())
    made.through(made.settings.timeouts.start_s + 0.5)
    assert [rank.member.coordinate for rank in made.machine.state.roster.in_order()] == [LEFT, RIGHT]


def test_a_spare_is_called_to_the_coordinate_of_a_rank_that_is_lost() -> None:
    made = started()
    made.send(ProcessLost(Member(1, 0, LEFT), ProcessEnded()))
    welcome = only(Welcome, made.after(0.1))
    assert (welcome.slot, welcome.coordinate) == (4, LEFT)
    called = [record.payload for record in made.of(DecisionMade) if isinstance(record.payload, Called)][-1]
    assert called == Called(4, 0, LEFT)
    made.restart()
    assert made.machine.state.roster.by_slot[4].member.coordinate == LEFT, "the journal has it"


def test_a_rank_of_a_node_that_was_to_go_is_taken_where_its_group_lacks_one() -> None:
    """The node was announced to go, and is there still."""
    made = started(spares=0, checkpoint=("step-1", StateId(0, 1)))
    made.send(NodeLeaves("n1", 1.0, "maintenance"))
    made.send(*(ProcessLost(member, ProcessEnded()) for member in (Member(2, 0, RIGHT), Member(3, 0, LEFT))))
    made.quiesce([0, 1], STEP_3)
    assert len(made.machine.state.view.members) == 2  # type: ignore[union-attr]
    made.send(ProcessLost(Member(1, 0, RIGHT), ProcessEnded()))
    made.quiesce([0], STEP_3)
    made.join(1, "new")
    made.send(Ready(Member(1, 1, RIGHT)))
    made.through(1.1 * made.settings.timeouts.start_s)  # for a full world
    assert [str(member) for member in made.machine.state.view.members] == ["0.0", "1.1"]  # type: ignore[union-attr]


@pytest.mark.parametrize("sharding", ["none", "zero1", "fsdp"])
def test_a_world_shrinks_by_a_group_also_where_the_state_of_a_column_is_spread(sharding: str) -> None:
    """One rank of each column goes, and the others have copies of its part."""
    made = started(spares=0, optimizer_sharding=sharding)
    made.send(SettingChanged("world", 2.0))
    (proposal,) = {one.view.members for one in made.through(SETTLE_S + 0.5) if isinstance(one, Propose)}
    assert slots(proposal) == [0, 2]


def test_a_run_that_goes_back_says_which_part_is_lost() -> None:
    made = started(spares=0, checkpoint=("step-1", StateId(0, 1)))
    made.send(*(ProcessLost(Member(slot, 0, RIGHT), ProcessEnded()) for slot in (1, 2)))
    made.quiesce([0, 3], STEP_3)
    for slot in (1, 2):
        made.join(slot, "new")
        made.send(Ready(Member(slot, 1, RIGHT)))
    made.through(2.0)
    back = made.of(HistoryBegun)[-1]
    assert back.reason == "no rank at tensor=1 holds a clean state"


def test_no_spare_is_called_where_no_rank_is_missing() -> None:
    made = started()
    assert not [one for one in made.through(5.0) if isinstance(one, Welcome)]


def test_the_process_behind_a_lost_one_gets_its_coordinate_and_a_spare_that_was_called_keeps_its_own() -> None:
    made = started(spares=0)
    made.send(ProcessLost(Member(1, 0, RIGHT), ProcessEnded()))
    (welcome,) = [one for one in made.join(1, "new") if isinstance(one, Welcome)]
    assert (welcome.incarnation, welcome.coordinate) == (1, RIGHT)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("mesh.rows", {"mesh": {"rows": 2}}),
        ("mesh.tensor", {"mesh": {"tensor": 0}}),
        ("world", {"mesh": {"tensor": 3}}),
        ("shards", {"mesh": {"stage": 4}, "shards": 3}),
        ("optimizer_sharding", {"mesh": {"stage": 2}, "optimizer_sharding": "zero1"}),
        ("replica_size", {"replica_size": 2}),
        ("reduction", {"reduction": "native"}),
        ("verify.compute", {"verify": VerifySettings(compute=0.1)}),
        ("shards", {"shards": 1}),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as found:
        RunSettings(**{"world": 4, "shards": 8, "mesh": {"tensor": 2}, **changes})
    assert found.value.field == field


def test_a_mesh_has_its_groups_and_coordinates() -> None:
    run = RunSettings(world=4, shards=2, mesh={"tensor": 2})
    assert (run.group, run.coordinates, run.replicated) == (2, BOTH, False)
    one = RunSettings(world=4, mesh={"tensor": 1})
    assert (one.group, one.coordinates, one.replicated) == (1, (LEFT,), True)


def test_chaos_strikes_at_a_coordinate_that_the_run_has() -> None:
    run, chaos = RunSettings(world=4, mesh={"tensor": 2}, nodes=1), parse_chaos("mtbf=5s,kinds=kill_rank,coordinate=tensor:1")
    check(run, chaos)
    assert chaos.aim == RIGHT
    for settings, text in ((run, "tensor:2"), (RunSettings(world=4, nodes=1), "tensor:1"), (run, "rows:0")):
        with pytest.raises(ConfigError) as found:
            check(settings, dataclasses.replace(chaos, coordinate=(text,)))
        assert (found.value.field, found.value.value) == ("chaos.coordinate", text)


def test_a_page_says_at_which_coordinate_each_rank_is() -> None:
    made, tally = started(), Tally()
    made.send(ProcessLost(Member(1, 0, LEFT), ProcessEnded()))
    for record in (*made.journal, *[one.record for one in made.machine.handle(Tick(), 0.2) if isinstance(one, Write)]):
        tally.add(record)
    assert [(one.slot, one.coordinate, one.state) for one in tally.slots()] == [
        (0, "tensor=0", "trains"), (1, "tensor=0", "lost"), (2, "tensor=1", "trains"), (3, "tensor=1", "trains"), (4, "tensor=0", "starts"),
    ]  # fmt: skip
