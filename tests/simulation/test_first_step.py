"""The first step of a process may take long: it loads and compiles. No rank waits for it in a view, and it is no fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Gathering
from fleet.protocol.records import Committed, DecisionMade, HistoryBegun, ProcessLost, ProcessUp, ViewPublished
from fleet.protocol.types import Member
from fleet.simulation.plan import FAST, Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation.runs import completed, rollbacks

LONG_S = 4 * FAST.progress_s


def plan(seed: int, steps: int = 40, world: int = 2) -> Plan:
    """Each process takes a long time for its first step; those of the same moment take unequally long."""
    return Plan(seed=seed, settings=small(world, nodes=1), steps=steps, capacity=4, rehearse_s=(LONG_S, 1.2 * LONG_S), save_every_s=1.5)


def of(outcome: Outcome, kind: type) -> list:
    return [record for record in outcome.world.journal if isinstance(record, kind)]


@pytest.mark.parametrize("seed", range(6))
def test_a_first_step_that_takes_long_is_no_fault(seed: int) -> None:
    outcome = completed(replace(plan(seed), quiet_s=100.0))
    assert not of(outcome, ProcessLost) and not of(outcome, HistoryBegun)
    gathered = [record for record in of(outcome, DecisionMade) if isinstance(record.payload, Gathering)]
    assert not gathered, "no view is left that nobody could form"
    assert len(of(outcome, ViewPublished)) == 1, "who is ready first waits for the others"


@pytest.mark.parametrize("seed", range(6))
def test_the_others_go_on_while_a_replacement_takes_its_first_step(seed: int) -> None:
    outcome = completed(plan(seed, steps=900), Trouble(kind="kill", point="committed", step=20, slot=1))
    [lost] = of(outcome, ProcessLost)
    [up] = [record for record in of(outcome, ProcessUp) if record.member.incarnation == 1]
    entered = [record for record in of(outcome, ViewPublished) if record.graceful and record.at_s > up.at_s]
    assert entered and entered[0].at_s - up.at_s > LONG_S and rollbacks(outcome) == 0
    meanwhile = [record for record in of(outcome, Committed) if lost.at_s + 1.0 < record.at_s < entered[0].at_s]
    assert len(meanwhile) > 100
    stuck = [record for record in of(outcome, DecisionMade) if isinstance(record.payload, Gathering)]
    assert [record.payload.why for record in stuck] == [GatherWhy.LOST]


def test_all_are_lost_and_none_of_the_new_ones_is_ended_for_being_slow() -> None:
    """There is no checkpoint, so a fresh process has to begin: one that is at its first step is waited for."""
    kill = Trouble(kind="kill", at_s=1.3 * LONG_S, slots=(0, 1))
    outcome = completed(replace(plan(3, steps=400), save_every_s=1000.0), kill)
    assert sorted({record.member for record in of(outcome, ProcessLost)}) == [Member(0, 0), Member(1, 0)]


def test_the_plan_above_has_a_cold_start() -> None:
    """Else the tests above show nothing."""
    outcome = completed(with_troubles(plan(0), ()))
    first_s = min(record.at_s for record in of(outcome, ViewPublished))
    assert first_s > LONG_S
