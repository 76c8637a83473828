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
from fleet.protocol.events import ProcessLost, Ready, Tick
from fleet.protocol.instructions import Publish, Welcome, Write
from fleet.protocol.records import DecisionMade, HistoryBegun
from fleet.protocol.types import Candidate, Coordinate, Member, Situation, StateId, groups
from fleet.settings.run import Budgets, RunSettings, VerifySettings
from policies.recovery import SETTLE_S, ReformPromoteRegrow
from tests.unit.test_machine import STEP_3, Bench, only

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


def started(spares: int = 1, checkpoint: tuple[str, StateId] | None = None) -> Bench:
    made = Bench(world=4, spares=spares, mesh={"tensor": 2}, nodes=2, checkpoint=checkpoint)
    for slot in range(4 + spares):
        (welcome,) = [one for one in made.join(slot) if isinstance(one, Welcome)]
        made.send(Ready(Member(slot, 0, welcome.coordinate)))
    view = only(Publish, made.after(0.1)).view
    made.form(view.members, STEP_3)
    return made


def test_the_ranks_of_a_node_are_whole_groups_and_the_rest_are_spares() -> None:
    """Slots 0, 2 and 4 are on one node, the others on another."""
    made = started()
    assert [rank.member.coordinate for rank in made.machine.state.roster.in_order()] == [LEFT, RIGHT, RIGHT, LEFT, ()]
    view = made.machine.state.view
    assert view is not None
    assert [[view.members[rank].slot for rank in together] for together in groups(view.members)] == [[0, 2], [3, 1]]


def test_a_spare_is_called_to_the_coordinate_of_a_rank_that_is_lost() -> None:
    made = started()
    made.send(ProcessLost(Member(1, 0, RIGHT), ProcessEnded()))
    welcome = only(Welcome, made.after(0.1))
    assert (welcome.slot, welcome.coordinate) == (4, RIGHT)
    (called,) = [record.payload for record in made.of(DecisionMade) if isinstance(record.payload, Called)]
    assert called == Called(4, 0, RIGHT)
    made.restart()
    assert made.machine.state.roster.by_slot[4].member.coordinate == RIGHT, "the journal has it"


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
    made.send(ProcessLost(Member(1, 0, RIGHT), ProcessEnded()))
    for record in (*made.journal, *[one.record for one in made.machine.handle(Tick(), 0.2) if isinstance(one, Write)]):
        tally.add(record)
    assert [(one.slot, one.coordinate, one.state) for one in tally.slots()] == [
        (0, "tensor=0", "trains"), (1, "tensor=1", "lost"), (2, "tensor=1", "trains"), (3, "tensor=0", "trains"), (4, "tensor=1", "starts"),
    ]  # fmt: skip
