"""Nodes are announced to be taken away: their ranks leave at a step boundary, and no step is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.protocol.causes import GatherWhy, TakenAway
from fleet.protocol.decisions import Gathering, Notice
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ViewPublished
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.families import notices_plan
from tests.simulation.runs import simulate

MOST = 60


def test_in_these_seeds_ranks_are_let_go_and_stay_after_all() -> None:
    """Else the test above shows little."""
    reported = [decision.action for seed in range(MOST) for decision in notices(simulate(notices_plan(seed)))]
    assert reported.count("released") > MOST // 10 and reported.count("stay") > MOST // 20


def notices(outcome: Outcome) -> list[DecisionMade]:
    return [one for one in outcome.world.journal if isinstance(one, DecisionMade) and isinstance(one.payload, Notice)]


def run(*troubles: Trouble, spares: int = 1, seed: int = 1, **changes: Any) -> Outcome:
    """Three ranks, each on a host of its own, and one more host with the spare."""
    settings = small(3, spares=spares, nodes=3 + spares)
    plan = Plan(seed=seed, settings=settings, steps=400, capacity=1, shard_s=0.02, save_every_s=2.0)
    outcome = simulate(with_troubles(replace(plan, **changes), troubles))
    assert not outcome.broken, outcome.report()
    assert outcome.status == "completed", outcome.reason
    return outcome


def worlds(outcome: Outcome) -> list[int]:
    """How many ranks compute in the views, in order."""
    return [len(record.view.computing) for record in outcome.world.journal if isinstance(record, ViewPublished)]


def nobody_was_missed(outcome: Outcome) -> bool:
    """Only ranks that had left the view were lost, and nothing was done twice."""
    lost = [record for record in outcome.world.journal if isinstance(record, ProcessLost)]
    again = [record for record in outcome.world.journal if isinstance(record, HistoryBegun)]
    return all(isinstance(record.cause, TakenAway) and record.generation == -1 for record in lost) and not again


@pytest.mark.parametrize("mode", ["none", "zero1", "fsdp"])
@pytest.mark.parametrize("seed", range(3))
def test_the_spare_comes_and_the_rank_leaves_at_one_step_boundary(seed: int, mode: str) -> None:
    changes = {"settings": replace(small(3, spares=1, nodes=4), optimizer_sharding=mode)} if mode != "none" else {}
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=6.0), seed=seed, **changes)
    assert [decision.action for decision in notices(outcome)] == ["leave", "released"]
    beside = entered_beside_the_steps(outcome)
    assert set(worlds(outcome)) == {3} and beside == [False, *[True] * (len(beside) - 1)]
    assert len(beside) == (2 if mode == "none" else 4), "a spare of a sharded run is in the view before, and the next one behind it"
    assert nobody_was_missed(outcome)


def test_a_spare_takes_the_place_of_a_rank_of_a_group() -> None:
    settings = replace(small(4, spares=1, nodes=5), optimizer_sharding="fsdp", replica_size=2)
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=6.0), settings=settings)
    assert set(worlds(outcome)) == {4} and entered_beside_the_steps(outcome) == [False, True, True, True]
    assert nobody_was_missed(outcome)


def entered_beside_the_steps(outcome: Outcome) -> list[bool]:
    return [record.graceful for record in outcome.world.journal if isinstance(record, ViewPublished)]


@pytest.mark.parametrize("mode", ["none", "fsdp"])
@pytest.mark.parametrize("point", ["forming", "compute", "reducing", "ready", "mutating", "committed", "entering", "receiving", "placed"])
def test_whoever_is_lost_while_ranks_come_and_leave_costs_no_state(point: str, mode: str) -> None:
    """The coordinator, the newcomer, the leaving rank, or one that stays. Of two copies of each chunk one is left then."""
    settings = replace(small(3, spares=1, nodes=4), optimizer_sharding=mode, optimizer_copies=2)
    for kind, slot in (("coordinator", None), ("kill", 0), ("kill", 1), ("kill", 2)):
        ill = Trouble(kind=kind, point=point, at_s=2.9, slot=slot, duration_s=0.3)
        outcome = run(Trouble(kind="notice", at_s=2.9, node=1, duration_s=6.0), ill, settings=settings, steps=80)
        assert not any(isinstance(record, HistoryBegun) for record in outcome.world.journal)


def test_the_only_rank_leaves_once_the_spare_has_its_state() -> None:
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=6.0), settings=small(1, spares=1, nodes=2))
    assert worlds(outcome) == [1, 2, 1] and entered_beside_the_steps(outcome) == [False, True, True]
    assert nobody_was_missed(outcome)


def test_a_rank_that_comes_to_no_boundary_in_time_is_called_out() -> None:
    """A step takes longer than the notice."""
    outcome = run(Trouble(kind="notice", at_s=20.0, node=1, duration_s=2.2), shard_s=1.0, steps=12)
    called = [one for one in outcome.world.journal if isinstance(one, DecisionMade) and isinstance(one.payload, Gathering)]
    assert GatherWhy.MAINTENANCE in [one.payload.why for one in called if isinstance(one.payload, Gathering)]
    lost = [record for record in outcome.world.journal if isinstance(record, ProcessLost | HistoryBegun)]
    assert [isinstance(one, ProcessLost) and one.generation == -1 for one in lost] == [True], "it had left the view"


def test_without_a_spare_the_world_shrinks_right_before_the_node_goes() -> None:
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=6.0), spares=0)
    [reported, released] = notices(outcome)
    assert isinstance(reported.payload, Notice) and reported.payload.until_s is not None
    assert 0.0 < reported.payload.until_s - released.at_s < 5.0
    assert entered_beside_the_steps(outcome)[:2] == [False, True]
    assert worlds(outcome)[:2] == [3, 2] and worlds(outcome)[-1] == 3, "the node that comes in its place is used"
    assert nobody_was_missed(outcome)


def test_a_notice_that_is_withdrawn_changes_nothing_while_nobody_could_stand_in() -> None:
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=1.0, withdrawn=True), spares=0)
    actions = [decision.action for decision in notices(outcome)]
    assert actions[0] == "leave" and actions[-1] == "stay"
    assert worlds(outcome)[-1] == 3


def test_a_coordinator_that_is_killed_remembers_the_notice() -> None:
    kills = Trouble(kind="coordinator", at_s=3.2, duration_s=0.5)
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=6.0), kills)
    assert [decision.action for decision in notices(outcome)] == ["leave", "released"]
    assert nobody_was_missed(outcome)


def test_two_nodes_at_once_and_one_spare() -> None:
    """One of them is stood in for; for the other one the world shrinks."""
    outcome = run(*(Trouble(kind="notice", at_s=3.0, node=node, duration_s=6.0) for node in (0, 1)))
    assert min(worlds(outcome)) == 2 and nobody_was_missed(outcome)
