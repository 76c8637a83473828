"""Nodes are announced to be taken away: their ranks leave at a step boundary, and no step is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.protocol.causes import TakenAway
from fleet.protocol.decisions import Notice
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
    """Sizes of the views, in order, up to the one without the node."""
    return [len(record.view.members) for record in outcome.world.journal if isinstance(record, ViewPublished)]


def nobody_was_missed(outcome: Outcome) -> bool:
    """Only ranks that had left the view were lost, and nothing was done twice."""
    lost = [record for record in outcome.world.journal if isinstance(record, ProcessLost)]
    again = [record for record in outcome.world.journal if isinstance(record, HistoryBegun)]
    return all(isinstance(record.cause, TakenAway) and record.generation == -1 for record in lost) and not again


@pytest.mark.parametrize("seed", range(4))
def test_the_spare_is_taken_in_before_the_rank_leaves(seed: int) -> None:
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=6.0), seed=seed)
    assert [decision.action for decision in notices(outcome)] == ["leave", "released"]
    assert worlds(outcome)[-3:] == [3, 4, 3]
    assert nobody_was_missed(outcome)


def test_without_a_spare_the_world_shrinks_right_before_the_node_goes() -> None:
    outcome = run(Trouble(kind="notice", at_s=3.0, node=1, duration_s=6.0), spares=0)
    [reported, released] = notices(outcome)
    assert isinstance(reported.payload, Notice) and reported.payload.until_s is not None
    assert 0.0 < reported.payload.until_s - released.at_s < 4.0
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
