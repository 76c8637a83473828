"""A node is announced to go, goes, and comes back; or what was announced is taken back."""

from __future__ import annotations

from chaos.injector import ChaosView, FaultAction, Injector, Occupant
from fleet.protocol.operations import ANNOUNCE, HEAL, START, WITHDRAW, Operation
from fleet.protocol.types import Fault, Member, Process
from tests.support.injected import inject

FAULT = Fault("m1", 1.0, "host_maintenance", "maintenance", node=1, duration_s=5.0)


def view(nodes: int = 3, running: bool = True) -> ChaosView:
    slots = {slot: Occupant(Member(slot, 0), Process(f"node{slot}", 10 + slot, 1), slot < 2) for slot in range(nodes)}
    return ChaosView(slots, {index: (index,) for index in range(nodes)}, running, True)


class World:
    """What was ordered, in order; ``refuses`` are phases that nobody carries out."""

    def __init__(self, *refuses: str) -> None:
        self.orders: list[tuple[str, int | None]] = []
        self.refuses = refuses

    def operate(self, order: Operation) -> str | None:
        self.orders.append((order.phase, order.node))
        return "no" if order.phase in self.refuses else None

    def turn(self, injector: Injector, now_s: float, seen: ChaosView) -> list[str]:
        return [event.phase for event in inject(injector, injector.due(now_s, seen), now_s, self.operate)]


def injector() -> Injector:
    return Injector([FAULT], repair_s=10.0)


def test_it_is_announced_then_carried_out_and_then_the_node_is_back() -> None:
    one, world = injector(), World()
    assert world.turn(one, 1.0, view()) == ["announced"] and one.next_s() == 6.0
    assert world.turn(one, 5.9, view()) == []
    assert world.turn(one, 6.0, view()) == ["executed"] and one.next_s() == 16.0
    assert world.turn(one, 16.0, view(nodes=1)) == ["healed"]
    assert world.orders == [(ANNOUNCE, 1), (START, 1), (HEAL, 1)] and one.next_s() == float("inf")


def test_a_node_that_is_gone_when_it_is_due_is_not_lost_again() -> None:
    one, world = injector(), World()
    world.turn(one, 1.0, view())
    assert world.turn(one, 6.0, view(nodes=1)) == ["suppressed"]
    assert world.orders == [(ANNOUNCE, 1), (WITHDRAW, 1)] and one.next_s() == float("inf")


def test_what_nobody_could_be_told_of_does_not_happen() -> None:
    one, world = injector(), World(ANNOUNCE)
    assert world.turn(one, 1.0, view()) == ["suppressed"]
    assert world.turn(one, 7.0, view()) == [] and world.orders == [(ANNOUNCE, 1)]


def test_it_is_taken_back_when_chaos_is_called_off_and_not_when_the_run_ends() -> None:
    def call_off(one: Injector, now_s: float, seen: ChaosView) -> list[FaultAction]:
        return one.call_off(now_s, seen, "enough")

    for ends, orders in ((Injector.end, [(ANNOUNCE, 1)]), (call_off, [(ANNOUNCE, 1), (WITHDRAW, 1)])):
        one, world = injector(), World()
        world.turn(one, 1.0, view())
        [report] = inject(one, ends(one, 2.0, view()), 2.0, world.operate)
        assert report.phase == "suppressed" and world.orders == orders
        assert world.turn(one, 9.0, view()) == []
