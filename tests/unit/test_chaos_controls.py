"""Orders to chaos: checked when given, carried out in the injector's turn, and planned faults keep still while it is stopped."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from chaos.controls import MOST_WAITING, ChaosControls, obey
from chaos.injector import ChaosView, Injector, Occupant
from fleet.errors import ConfigError
from fleet.protocol.fault_kinds import BY_HAND
from fleet.protocol.types import Fault, Member, Process

WORLD = ChaosView({s: Occupant(Member(s, 0), Process("n", 100 + s, 1), True) for s in range(3)}, {0: (0, 1, 2), 1: ()}, True)
PLANNED = Fault("f1", 5.0, "gpu", "kill_rank", slot=0)


def no_storm() -> tuple[Fault, ...]:
    return ()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"kind": "meteor", "slot": 0}, "kind"),
        ({"kind": "kill_rank"}, "slot"),
        ({"kind": "kill_rank", "slot": 3}, "slot"),
        ({"kind": "kill_rank", "slot": -1}, "slot"),
        ({"kind": "lose_node", "slot": 1}, "node"),
        ({"kind": "hang", "slot": 0, "amounts": {"duration_s": math.inf}}, "duration_s"),
        ({"kind": "hang", "slot": 0, "amounts": {"duration_s": 0}}, "duration_s"),
        ({"kind": "slow", "slot": 0, "amounts": {"severity": math.nan}}, "severity"),
    ],
)
def test_an_impossible_fault_is_refused_by_name(asked: dict[str, Any], field: str) -> None:
    controls = ChaosControls(slots=3, nodes=2, planned=True)
    with pytest.raises(ConfigError) as refusal:
        controls.inject(**asked)
    assert refusal.value.field == field
    assert not controls.waiting


def test_one_fault_by_hand_strikes_at_once_and_is_on_record() -> None:
    controls, injector = ChaosControls(slots=3, nodes=2, planned=False), Injector([])
    name = controls.inject("kill_rank", slot=1)
    [planned] = obey(controls.take(), injector, 7.0, no_storm)
    assert (planned.fault.id, planned.fault.component, planned.phase) == (name, BY_HAND, "planned")
    [action] = injector.due(7.0, WORLD)
    [order] = action.operations
    assert (order.fault, order.kind, order.process) == (name, "kill_rank", Process("n", 101, 1))
    assert controls.take() == []


def test_while_it_is_stopped_planned_faults_keep_still_and_others_strike() -> None:
    controls, injector = ChaosControls(slots=3, nodes=2, planned=True), Injector([PLANNED])
    controls.stop()
    controls.inject("kill_rank", slot=2)
    obey(controls.take(), injector, 6.0, no_storm)
    phases = {action.report.fault.id: action.report for action in injector.due(6.0, WORLD)}
    assert phases["f1"].phase == "suppressed"
    assert "stopped by an operator" in phases["f1"].detail
    assert phases["by-hand-1"].phase == "executed"
    assert not controls.status()["running"]


def test_started_again_it_goes_on_with_its_plan_or_with_a_storm() -> None:
    controls = ChaosControls(slots=3, nodes=2, planned=True)
    controls.stop()
    controls.start()
    with_plan = Injector([PLANNED])
    orders = controls.take()
    assert obey(orders, with_plan, 1.0, lambda: (PLANNED,)) == []
    assert with_plan.due(5.0, WORLD)[0].report.phase == "executed"
    without = Injector([])
    [report] = obey(orders, without, 10.0, lambda: (PLANNED,))
    assert report.fault.at_s == 15.0
    assert without.next_s() == 15.0


def test_a_run_that_ended_or_is_flooded_takes_no_orders() -> None:
    controls = ChaosControls(slots=1, nodes=1, planned=False)
    for _ in range(MOST_WAITING):
        controls.start()
    with pytest.raises(ConfigError, match="wait to be carried out"):
        controls.stop()
    controls.close()
    with pytest.raises(ConfigError, match="no chaos any more"):
        controls.start()
    assert controls.status()["ended"]


def test_all_is_healed_on_order_and_planned_faults_go_on() -> None:
    later = dataclasses.replace(PLANNED, id="f2", at_s=50.0)
    hang = Fault("h", 1.0, "hang", "hang", slot=1, duration_s=100.0)
    controls, injector = ChaosControls(slots=3, nodes=2, planned=True), Injector([hang, later])
    injector.due(1.0, WORLD)
    assert injector.next_s() == 50.0
    assert "healed" in controls.heal()
    obey(controls.take(), injector, 6.0, no_storm)
    assert injector.next_s() < 6.0
    [action] = injector.due(6.0, WORLD)
    assert (action.report.phase, [order.phase for order in action.operations]) == ("healed", ["heal"])
    assert injector.next_s() == 50.0 and injector.due(7.0, WORLD) == []
