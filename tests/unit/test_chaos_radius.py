"""How much of a run chaos may hit, at once and within an hour; and faults that come at a step."""

from __future__ import annotations

import dataclasses

import pytest

from chaos.controls import ChaosControls
from chaos.injector import ChaosView, FaultAction, Injector, Occupant
from chaos.live import live_chaos
from chaos.radius import HOUR_S, limits_of
from chaos.settings import parse_chaos
from fleet.app.experiment_probes import _chaos
from fleet.errors import ConfigError
from fleet.protocol.facts import FaultRecord
from fleet.protocol.types import Fault, Member, Process
from fleet.settings.run import RunSettings
from tests.unit.test_chaos_injector import fault, occupant, phases


def view(reborn: tuple[int, ...] = (), racks: tuple[str, ...] = ("a", "a", "b", "b")) -> ChaosView:
    """Eight ranks, two on each of four nodes in two racks; those of the ``reborn`` slots are processes that came after others."""
    slots = {slot: occupant(slot, int(slot in reborn)) for slot in range(8)}
    return ChaosView(slots, {node: (2 * node, 2 * node + 1) for node in range(4)}, True, True, dict(enumerate(racks)))


def why(action: FaultAction) -> str:
    assert action.report.phase == "suppressed"
    return action.report.detail


def belted(*limits: str, faults: tuple[Fault, ...], repair_s: float | None = None) -> Injector:
    return Injector(faults, max_nodes_down=9, repair_s=repair_s, limits=limits_of(limits))


def test_no_more_ranks_are_hit_at_once_than_may_be_and_what_is_kept_back_says_why() -> None:
    injector = belted("ranks:1", faults=(fault("a", 1.0, "kill_rank", 0), fault("b", 2.0, "hang", 3, duration_s=5.0)))
    first, second = injector.due(2.0, view())
    assert first.report.phase == "executed" and not second.operations
    assert why(second) == "chaos.limits: 2 ranks would be hit at once, of at most 1"


def test_a_rank_is_hit_until_its_slot_trains_again() -> None:
    planned = tuple(fault(name, at_s, "kill_rank", slot) for name, at_s, slot in (("a", 1.0, 0), ("b", 2.0, 3), ("c", 3.0, 3)))
    injector = belted("ranks:1", faults=planned)
    assert phases(injector.due(1.0, view())) == [("a", "executed")]
    starting = dataclasses.replace(view(), slots={**view().slots, 0: Occupant(Member(0, 1), Process("node-0", 7, 7), False)})
    assert phases(injector.due(2.0, starting)) == [("b", "suppressed")]
    assert phases(injector.due(3.0, view(reborn=(0,)))) == [("c", "executed")]


def test_what_was_stopped_is_hit_until_it_is_healed() -> None:
    planned = tuple(fault(name, at_s, "hang", slot, duration_s=5.0) for name, at_s, slot in (("a", 1.0, 0), ("b", 5.0, 3), ("c", 6.0, 3)))
    injector = belted("ranks:1", faults=planned)
    assert phases(injector.due(1.0, view())) == [("a", "executed")]
    assert phases(injector.due(5.0, view())) == [("b", "suppressed")]
    assert phases(injector.due(6.0, view())) == [("a", "healed"), ("c", "executed")]


def test_nodes_and_their_ranks_count_and_a_rack_counts_as_one() -> None:
    lost = tuple(fault(f"n{node}", 1.0 + node, "lose_node", node) for node in range(2))
    assert phases(belted("nodes:1", faults=lost).due(2.0, view())) == [("n0", "executed"), ("n1", "suppressed")]
    assert phases(belted("ranks:3", faults=lost).due(2.0, view())) == [("n0", "executed"), ("n1", "suppressed")]
    rack = Fault("r", 1.0, "test", "rack", None, 0)
    assert phases(belted("domains:1", faults=(rack,)).due(1.0, view())) == [("r", "executed")]
    assert why(belted("domains:0", faults=(rack,)).due(1.0, view())[0]).startswith("chaos.limits: 1 domains would be hit at once")
    assert phases(belted("nodes:1", faults=(rack,)).due(1.0, view())) == [("r", "suppressed")], "it has two nodes"


def test_so_many_an_hour_may_be_hit_whether_or_not_they_are_back() -> None:
    planned = tuple(fault(str(number), 10.0 * number, "kill_rank", number) for number in range(1, 4))
    injector = belted("ranks/h:2", faults=(*planned, fault("late", 10.0 + HOUR_S, "kill_rank", 5)))
    back = view(reborn=(1, 2, 3))
    assert [phases(injector.due(10.0 * number, view()))[0][1] for number in (1, 2)] == ["executed", "executed"]
    assert why(injector.due(30.0, back)[0]) == "chaos.limits: 3 ranks would be hit within an hour, of at most 2"
    assert phases(injector.due(10.0 + HOUR_S, back)) == [("late", "executed")], "the first of them is an hour ago"


def test_what_was_refused_has_hit_nothing() -> None:
    injector = belted("ranks:1", "ranks/h:1", faults=(fault("a", 1.0, "kill_rank", 0), fault("b", 2.0, "kill_rank", 3)))
    [action] = injector.due(1.0, view())
    assert injector.outcome(action, ["no such process"], 1.0).phase == "suppressed"
    assert phases(injector.due(2.0, view())) == [("b", "executed")]


def test_a_node_that_is_announced_counts_and_is_not_counted_twice() -> None:
    planned = (Fault("m", 1.0, "test", "maintenance", None, 0, duration_s=10.0), fault("n", 2.0, "lose_node", 1))
    injector = belted("nodes:1", "nodes/h:1", faults=planned)
    assert phases(injector.due(1.0, view())) == [("m", "announced")]
    assert phases(injector.due(2.0, view())) == [("n", "suppressed")]
    assert phases(injector.due(11.0, view())) == [("m", "executed")]


def test_all_ranks_are_hit_by_what_takes_them_all() -> None:
    controller = Fault("c", 1.0, "test", "kill_controller")
    reachable = dataclasses.replace(view(), hosts={-1: "head"})
    assert phases(belted("ranks:7", faults=(controller,)).due(1.0, reachable)) == [("c", "suppressed")]


class World:
    """Eight ranks that are never replaced; each fault is reported."""

    def __init__(self) -> None:
        self.records: list[FaultRecord] = []

    def see(self) -> ChaosView:
        return view()

    def operate(self, order: object) -> str | None:
        return None

    def report(self, event: FaultRecord) -> None:
        self.records.append(event)

    def learned(self, fault: str) -> str:
        return ""

    def committed_step(self) -> int | None:
        return 0

    def report_floor(self, event: object) -> None:
        raise AssertionError("there is no floor")


class Ticking:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def pause(self, seconds: float) -> bool:
        self.time_s += 0.5
        return self.time_s > 120.0


def test_chaos_at_rates_keeps_to_the_limits_of_its_settings_and_reports_what_it_kept_back() -> None:
    chaos = parse_chaos("mtbf=2s,duration=100s,kinds=kill_rank,limits=ranks:2")
    settings, world, clock = RunSettings(world=8, nodes=4), World(), Ticking()
    live_chaos(settings, chaos, ChaosControls(8, 4, True), world).run(clock, clock.pause)
    executed = [record for record in world.records if record.phase == "executed"]
    kept_back = [record for record in world.records if record.phase == "suppressed"]
    assert len(executed) == 2 and len({member.slot for record in executed for member in record.members}) == 2
    assert len(kept_back) > 10 and any("chaos.limits: 3 ranks would be hit at once, of at most 2" in one.detail for one in kept_back)


def test_limits_are_a_setting_and_those_of_an_experiment_are_the_same() -> None:
    assert parse_chaos("mtbf=15s,limits=ranks:2+nodes/h:6").limits == ("ranks:2", "nodes/h:6")
    assert parse_chaos(_chaos("storm", {"ranks": 2, "nodes/h": 6}, 0.5)).limits == ("ranks:2", "nodes/h:6")
    for wrong, says in (
        ("racks:1", "is no limit"), ("ranks", "is no limit"), ("ranks:x", "x is no whole number of ranks"),
        ("ranks:", "nothing is no whole number"),
        ("ranks:1+ranks:2", "is limited twice"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            parse_chaos(f"mtbf=15s,limits={wrong}")


# ---- at steps ----------------------------------------------------------------------------------------------------------------------------


class Stepping(World):
    """Commits ``per_s`` steps a second of a run of 100."""

    def __init__(self, clock: Ticking, per_s: float) -> None:
        super().__init__()
        self._clock, self._per_s, self.hit_at = clock, per_s, list[int]()

    def committed_step(self) -> int | None:
        step = int(self._clock.time_s * self._per_s)
        return step if step < 100 else None

    def operate(self, order: object) -> str | None:
        self.hit_at.append(self.committed_step() or -1)
        return None


def stepped(per_s: float, text: str) -> Stepping:
    clock = Ticking()
    world = Stepping(clock, per_s)
    live_chaos(RunSettings(world=8, nodes=4, seed=3), parse_chaos(text), ChaosControls(8, 4, True), world).run(clock, clock.pause)
    return world


def test_a_fault_at_a_step_hits_a_slow_machine_as_a_fast_one() -> None:
    fast, slow = (stepped(per_s, "at=step:20+step:8,kinds=kill_rank") for per_s in (4.0, 1.0))
    assert fast.hit_at == slow.hit_at == [8, 20]
    executed = [[(one.fault.id, one.members) for one in world.records if one.phase == "executed"] for world in (fast, slow)]
    assert executed[0] == executed[1] and [name for name, _ in executed[0]] == ["kill_rank-at-step-8", "kill_rank-at-step-20"]
    times = [[one.at_s for one in world.records if one.phase == "executed"] for world in (fast, slow)]
    assert times[0][0] < times[1][0], "the slow one comes there later"


def test_a_step_that_never_came_is_on_record() -> None:
    world = stepped(4.0, "at=step:5000,kinds=hang+kill_rank,limits=ranks:1")
    assert [(one.fault.id, one.phase) for one in world.records] == [
        ("hang-at-step-5000", "planned"), ("kill_rank-at-step-5000", "planned"),
        ("hang-at-step-5000", "suppressed"), ("kill_rank-at-step-5000", "suppressed"),
    ]  # fmt: skip
    assert all(one.detail == "the run ended before it was due" for one in world.records if one.phase == "suppressed")


def test_what_is_wrong_about_steps_is_refused() -> None:
    for wrong, says in (
        ("at=step:5", "gives a time, and no kind of fault"), ("at=soon,kinds=hang", "is no step"), ("at=step:-5,kinds=hang", "is no step"),
        ("at=step:5,kinds=hang,mtbf=5s", "contradicts mtbf"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            parse_chaos(wrong)
