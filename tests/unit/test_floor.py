"""Chaos that costs more than it may: when the floor is reached, and what is done then."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.controls import ChaosControls
from chaos.injector import ChaosView, Injector
from chaos.live import LiveChaos
from chaos.settings import parse_chaos
from fleet.app.experiment_probes import _chaos
from fleet.errors import ConfigError
from fleet.ledger.pace import LEAST_STEPS, WINDOW_S, Floor, least_goodput
from fleet.protocol.events import FloorReached
from fleet.protocol.facts import FaultRecord
from fleet.protocol.operations import HEAL, START, Operation
from fleet.protocol.records import Committed, Record
from fleet.protocol.types import Fault, StateId
from tests.unit.test_chaos_injector import three_nodes


def ran(floor: Floor, since_s: float, until_s: float, per_s: float, step: int = 0) -> int:
    """Steps at a pace, seen once a second; returns the last one."""
    at_s = since_s
    while at_s < until_s:
        at_s += 1.0
        floor.see(at_s, step + int((at_s - since_s) * per_s))
    return step + int((at_s - since_s) * per_s)


def test_all_is_kept_while_nothing_happens_and_nothing_is_known_before_a_window_is_full() -> None:
    floor = Floor(0.5)
    ran(floor, 0.0, LEAST_STEPS, 2.0)
    assert floor.kept(LEAST_STEPS) is None and not floor.broken(LEAST_STEPS)
    ran(floor, LEAST_STEPS, 60.0, 2.0, 2 * LEAST_STEPS)
    assert floor.kept(60.0) == pytest.approx(1.0, abs=0.05)


def test_half_of_the_pace_is_half_and_faults_do_not_lower_the_pace() -> None:
    floor = Floor(0.6)
    step = ran(floor, 0.0, 40.0, 2.0)
    floor.injected()
    ran(floor, 40.0, 200.0, 1.0, step)
    assert floor.kept(200.0) == pytest.approx(0.5, abs=0.05) and floor.broken(200.0)


def test_without_a_fault_no_floor_is_broken() -> None:
    """A long evaluation, say."""
    floor = Floor(0.5)
    ran(floor, 0.0, 40.0, 2.0)
    assert floor.kept(200.0) == 0.0 and not floor.broken(200.0)


def test_a_fault_that_comes_early_does_not_keep_the_pace_from_being_learned() -> None:
    floor = Floor(0.5)
    step = ran(floor, 0.0, 3.0, 2.0)
    floor.injected()
    ran(floor, 3.0, 60.0, 2.0, step)
    assert floor.kept(60.0) == pytest.approx(1.0, abs=0.05)
    assert floor.broken(60.0 + WINDOW_S)


def test_a_run_that_stands_still_keeps_nothing() -> None:
    floor = Floor(0.1)
    ran(floor, 0.0, 40.0, 2.0)
    floor.injected()
    assert not floor.broken(45.0)
    assert floor.kept(40.0 + 2 * WINDOW_S) == 0.0 and floor.broken(40.0 + 2 * WINDOW_S)


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class World:
    """Steps twice a second, until a fault strikes."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.orders, self.reported, self.stopped_s = clock, list[Operation](), list[Any](), 0.0

    def see(self) -> ChaosView:
        return three_nodes()

    def operate(self, order: Operation) -> str | None:
        self.orders.append(order)
        self.stopped_s = self.stopped_s or self.clock.time_s
        return None

    def report(self, event: FaultRecord) -> None:
        self.reported.append(event)

    def learned(self, fault: str) -> str:
        return "5 of 500 packets (1.00%)" if self.orders and self.orders[-1].phase == HEAL else ""

    def committed_step(self) -> int | None:
        return int(2 * min(self.clock.time_s, self.stopped_s or self.clock.time_s))

    def report_floor(self, event: FloorReached) -> None:
        self.reported.append(event)


def test_when_the_floor_is_reached_all_is_healed_and_no_more_strikes() -> None:
    clock = Clock()
    world = World(clock)
    faults = [Fault("h", 50.0, "test", "hang", 1, duration_s=500.0), Fault("k", 150.0, "test", "kill_rank", 2)]

    def pause(seconds: float) -> bool:
        clock.time_s += max(seconds, 0.5)
        return clock.time_s > 200.0

    LiveChaos(Injector(faults), ChaosControls(6, 3, True), world, tuple, Floor(0.3)).run(clock, pause)
    [reached] = [event for event in world.reported if isinstance(event, FloorReached)]
    assert reached.kept < reached.floor == 0.3
    assert [(order.kind, order.phase) for order in world.orders] == [("hang", START), ("hang", HEAL)]
    last = {event.fault.id: event.phase for event in world.reported if isinstance(event, FaultRecord)}
    assert last == {"h": "healed", "k": "suppressed"}
    [healed] = [event for event in world.reported if isinstance(event, FaultRecord) and event.phase == "healed"]
    assert healed.detail == "5 of 500 packets (1.00%)", "what was applied is on record"


def test_the_floor_is_a_setting_of_chaos() -> None:
    assert parse_chaos("mtbf=15s,floor=0.3").floor == 0.3 and parse_chaos("storm").floor is None
    with pytest.raises(ConfigError, match=r"chaos\.floor = 1\.5: must be greater than 0 and less than 1"):
        parse_chaos("mtbf=15s,floor=1.5")


def test_a_floor_names_its_window() -> None:
    named = parse_chaos("mtbf=15s,floor=goodput(60s) >= 0.9")
    assert (named.floor, named.floor_window_s) == (0.9, 60.0)
    assert parse_chaos(_chaos("storm", {}, "goodput(2m) >= 0.8")).floor_window_s == 120.0
    assert parse_chaos("mtbf=15s,floor=0.3").floor_window_s == WINDOW_S
    for wrong, says in (("goodput(60s)>0.9", "is no floor"), ("goodput(soon)>=0.9", "is not a time"), ("goodput(60s)>=2", "less than 1")):
        with pytest.raises(ConfigError, match=says):
            parse_chaos(f"mtbf=15s,floor={wrong}")


def test_a_longer_window_takes_longer_to_be_broken() -> None:
    """At two steps a second a stall of 20 s is two thirds of 30 s, and a third of 60 s."""
    for window_s, kept in ((30.0, 1 / 3), (60.0, 2 / 3)):
        floor = Floor(0.5, window_s)
        ran(floor, 0.0, 100.0, 2.0)
        floor.injected()
        assert floor.kept(120.0) == pytest.approx(kept, abs=0.05)
        assert floor.broken(120.0) == (window_s == 30.0)


def journal(stall_s: float) -> list[Record]:
    """Two steps a second for 100 s, but for a stall after a fault at 50 s."""
    hit = FaultRecord(Fault("h", 50.0, "test", "hang", 1, duration_s=stall_s), "executed", (), at_s=50.0)
    before = [Committed(StateId(0, step), step / 2.0) for step in range(100)]
    return [*before, hit, *(Committed(StateId(0, step), stall_s + step / 2.0) for step in range(100, 200))]


def test_the_least_goodput_of_any_window_is_that_of_the_worst_one() -> None:
    assert least_goodput(journal(0.0), 30.0) == pytest.approx(1.0, abs=0.03)
    assert least_goodput(journal(15.0), 30.0) == pytest.approx(0.5, abs=0.03)
    assert least_goodput(journal(15.0), 60.0) == pytest.approx(0.75, abs=0.03)
    assert least_goodput(journal(0.0), 600.0) is None, "it was shorter"
