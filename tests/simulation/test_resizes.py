"""The world has another size on purpose: more ranks are taken in, fewer go on, and no step is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.ledger.goodput import Ledger
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ViewPublished
from fleet.protocol.types import Member
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.families import resizes_plan
from tests.simulation.runs import simulate

MOST = 40


def test_in_these_seeds_worlds_shrink_and_grow() -> None:
    """Else the test above shows little."""
    outcomes = [simulate(resizes_plan(seed)) for seed in range(MOST)]
    smaller = sum(bool(shrunk(outcome)) for outcome in outcomes)
    larger = sum(max(worlds(outcome), default=0) > outcome.world.plan.settings.world for outcome in outcomes)
    assert smaller > MOST // 5 and larger > MOST // 10


def shrunk(outcome: Outcome) -> list[DecisionMade]:
    return [one for one in outcome.world.journal if isinstance(one, DecisionMade) and one.action == "shrink"]


def worlds(outcome: Outcome) -> list[int]:
    return [len(record.view.members) for record in outcome.world.journal if isinstance(record, ViewPublished)]


def run(*sizes: int, world: int = 3, most: int = 5, spares: int = 0, seed: int = 1, troubles: tuple[Trouble, ...] = ()) -> Outcome:
    """One size every three seconds."""
    settings = replace(small(world, spares=spares, nodes=2), max_world=most)
    plan = Plan(seed=seed, settings=settings, steps=300, capacity=3, shard_s=0.02, save_every_s=2.0)
    resizes = [Trouble(kind="resize", at_s=3.0 * (turn + 1), world=size) for turn, size in enumerate(sizes)]
    outcome = simulate(with_troubles(plan, (*resizes, *troubles)))
    assert not outcome.broken, outcome.report()
    assert outcome.status == "completed", outcome.reason
    return outcome


@pytest.mark.parametrize("seed", range(4))
def test_it_grows_and_shrinks_and_nobody_is_lost(seed: int) -> None:
    outcome = run(5, 2, 4, seed=seed)
    sizes = [size for size, before in zip(worlds(outcome), [0, *worlds(outcome)], strict=False) if size != before]
    assert sizes == [3, 5, 2, 4]
    assert [record.graceful for record in outcome.world.journal if isinstance(record, ViewPublished)][1:] == [True] * 3
    assert not any(isinstance(record, ProcessLost | HistoryBegun) for record in outcome.world.journal)


def test_a_rank_that_stands_by_fills_in_for_one_that_is_lost() -> None:
    """The world is 2 then, and there are five slots: one that has left the view by a resize comes back."""
    outcome = run(2, most=5, troubles=(Trouble(kind="kill", at_s=6.0, slot=0),))
    views = [record.view for record in outcome.world.journal if isinstance(record, ViewPublished)]
    assert len(views[-1].members) == 2 and Member(0, 0) not in views[-1].members
    assert all(member.incarnation == 0 for member in views[-1].members), "nobody had to be started for it"


def test_a_coordinator_that_is_killed_remembers_the_size() -> None:
    outcome = run(5, 2, troubles=tuple(Trouble(kind="coordinator", at_s=at_s, duration_s=0.5) for at_s in (3.2, 6.05)))
    assert worlds(outcome)[-1] == 2 and 5 in worlds(outcome)


def test_the_ledger_closes_and_knows_the_world_and_who_stands_by() -> None:
    summary = Ledger().apply_all(run(2, world=5, most=5).world.journal).summary()
    assert (summary.world, summary.spares) == (2, 3) and summary.closes
