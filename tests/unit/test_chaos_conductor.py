from __future__ import annotations

import math
from dataclasses import replace

import pytest

from chaos.conductor import Action, ChaosView, Conductor, Occupant, conduct
from fleet.protocol.events import FaultReported
from fleet.protocol.fault_kinds import HEAL, KINDS, START, Operation, operation
from fleet.protocol.records import FaultRecord
from fleet.protocol.types import Fault, Member, Process


def process(slot: int, incarnation: int = 0) -> Process:
    return Process(f"node-{slot // 2}", 100 + slot + 10 * incarnation, 5000 + slot + 10 * incarnation)


def occupant(slot: int, incarnation: int = 0, in_view: bool = True) -> Occupant:
    return Occupant(Member(slot, incarnation), process(slot, incarnation), in_view)


def world(running: bool = True) -> ChaosView:
    """Four ranks, two on each of two nodes."""
    return ChaosView({slot: occupant(slot) for slot in range(4)}, {0: (0, 1), 1: (2, 3)}, running)


def fault(name: str, at_s: float, kind: str, target: int, **more: float) -> Fault:
    node = kind in ("lose_node", "lemon_node") or more.pop("on_node", 0)
    return Fault(name, at_s, "test", kind, None if node else target, target if node else None, **more)


def told(action: Action) -> list[tuple[str, str, Process | int | None]]:
    """(kind, phase, target) of each operation."""
    return [(order.kind, order.phase, order.process if order.process is not None else order.node) for order in action.operations]


def phases(actions: list[Action]) -> list[tuple[str, str]]:
    return [(action.report.fault.id, action.report.phase) for action in actions]


def only(actions: list[Action]) -> Action:
    assert len(actions) == 1
    return actions[0]


def test_kills_at_its_time_and_once() -> None:
    conductor = Conductor([fault("k", 5.0, "kill_rank", 2)])
    assert conductor.next_s() == 5.0
    assert conductor.due(4.9, world()) == []
    action = only(conductor.due(5.1, world()))
    kill = fault("k", 5.0, "kill_rank", 2)
    order = operation(kill, START, process=process(2))
    assert (order.fault, order.kind, order.phase, order.node) == ("k", "kill_rank", START, None)
    assert action == Action(FaultReported(kill, "executed", 5.1, (Member(2, 0),)), (order,))
    assert conductor.outcome(action, [None], 5.2) == replace(action.report, at_s=5.2)
    assert conductor.due(99.0, world()) == []
    assert conductor.next_s() == math.inf


def test_planned_names_every_fault_in_order() -> None:
    conductor = Conductor([fault("b", 9.0, "hang", 1, duration_s=1.0), fault("a", 5.0, "kill_rank", 2)])
    assert [(e.fault.id, e.phase, e.at_s) for e in conductor.planned(0.0)] == [("a", "planned", 0.0), ("b", "planned", 0.0)]


def test_a_refused_kill_was_suppressed_and_may_be_tried_on_the_next_one() -> None:
    conductor = Conductor([fault("k", 5.0, "kill_rank", 2), fault("l", 6.0, "kill_rank", 2)])
    report = conductor.outcome(only(conductor.due(5.0, world())), ["pid 102 started at tick 9, not 5002"], 5.0)
    assert report.phase == "suppressed"
    assert "tick 9" in report.detail
    assert only(conductor.due(6.0, world())).report.phase == "executed"


@pytest.mark.parametrize(
    ("planned", "view", "says"),
    [
        (fault("f", 1.0, "kill_rank", 7), world(), "slot 7 has no live process"),
        (fault("f", 1.0, "kill_rank", 1), world(running=False), "does not train yet"),
        (fault("f", 1.0, "flip_weight", 1), ChaosView({0: occupant(0), 1: occupant(1)}, {0: (0, 1)}, True), "no majority"),
        (fault("f", 1.0, "lemon_node", 1), world(), "no operation yet"),
        (fault("f", 1.0, "lose_node", 5), world(), "node 5 is not there"),
        (fault("f", 1.0, "lose_node", 0), ChaosView({0: occupant(0)}, {0: (0,)}, True), "last node"),
        (fault("f", 1.0, "slow", 4, severity=2.0, duration_s=1.0, on_node=1), world(), "node 4 has no live process"),
    ],
)
def test_suppresses_with_a_reason(planned: Fault, view: ChaosView, says: str) -> None:
    action = only(Conductor([planned]).due(1.0, view))
    assert (action.report.phase, action.operations, action.report.members) == ("suppressed", (), ())
    assert says in action.report.detail


@pytest.mark.parametrize("kind", ["kill_rank", "hang", "lose_node"])
def test_never_leaves_fewer_ranks_than_the_run_needs(kind: str) -> None:
    blow = fault("f", 1.0, kind, 1, duration_s=1.0)
    left = 2 if kind == "lose_node" else 3
    assert only(Conductor([blow], min_ranks=left).due(1.0, world())).report.phase == "executed"
    refused = only(Conductor([blow], min_ranks=left + 1).due(1.0, world())).report
    assert (refused.phase, refused.detail) == ("suppressed", f"it would leave {left} ranks of at least {left + 1}")


def test_loses_all_ranks_where_asked_for_and_only_when_something_can_bring_them_back() -> None:
    crash = Fault("c", 1.0, "software", "kill_rank", slot=2)
    assert only(Conductor([crash]).due(1.0, world())).report.members == (Member(2, 0),), "not asked for"
    refused = only(Conductor([crash], lose_all=True).due(1.0, world())).report
    assert (refused.phase, refused.members) == ("suppressed", ())
    assert refused.detail == "it would leave 0 ranks, and neither memory nor store holds a state to go on from"
    action = only(Conductor([crash], lose_all=True).due(1.0, replace(world(), restorable=True)))
    assert told(action) == [("kill_rank", START, process(slot)) for slot in range(4)]
    assert action.report.members == tuple(Member(slot, 0) for slot in range(4))
    plan = [fault(f"k{slot}", 1.0, "kill_rank", slot) for slot in range(4)]
    assert len(Conductor(plan, lose_all=True).due(1.0, replace(world(), restorable=True))) == 4


def test_counts_what_it_has_just_killed_though_the_view_is_stale() -> None:
    plan = [fault(f"k{slot}", 1.0, "kill_rank", slot) for slot in range(4)]
    conductor = Conductor(plan, min_ranks=2)
    assert phases(conductor.due(1.0, world())) == [("k0", "executed"), ("k1", "executed"), ("k2", "suppressed"), ("k3", "suppressed")]
    again = Conductor([fault("a", 1.0, "kill_rank", 0), fault("b", 1.1, "kill_rank", 0)])
    again.due(1.0, world())
    assert only(again.due(1.1, world())).report.detail == "slot 0 has no live process"


def test_a_spare_may_die_even_when_every_rank_is_needed() -> None:
    view = ChaosView({**world().slots, 4: occupant(4, in_view=False)}, {0: (0, 1), 1: (2, 3, 4)}, True)
    assert only(Conductor([fault("k", 1.0, "kill_rank", 4)], min_ranks=4).due(1.0, view)).report.phase == "executed"


def test_hang_ends_with_a_resume() -> None:
    conductor = Conductor([fault("h", 1.0, "hang", 3, duration_s=2.0)])
    assert told(only(conductor.due(1.0, world()))) == [("hang", START, process(3))]
    assert conductor.next_s() == 3.0
    assert conductor.due(2.9, world()) == []
    heal = only(conductor.due(3.0, world()))
    assert (heal.report.phase, heal.report.members, told(heal)) == ("healed", (Member(3, 0),), [("hang", HEAL, process(3))])


def test_hang_that_was_evicted_heals_without_touching_the_replacement() -> None:
    conductor = Conductor([fault("h", 1.0, "hang", 3, duration_s=2.0)])
    conductor.due(1.0, world())
    replaced = ChaosView({**world().slots, 3: occupant(3, 1)}, world().nodes, True)
    heal = only(conductor.due(3.0, replaced))
    assert (heal.report.phase, heal.operations) == ("healed", ())
    assert "replaced" in heal.report.detail


def test_slow_node_slows_all_its_ranks_and_stopped_ones_are_left_alone() -> None:
    plan = [
        fault("h", 1.0, "hang", 3, duration_s=9.0),
        fault("s", 2.0, "slow", 0, severity=2.0, duration_s=4.0, on_node=1),
        fault("t", 3.0, "slow", 1, severity=2.0, duration_s=4.0),
        fault("u", 3.0, "slow", 3, severity=2.0, duration_s=4.0),
        fault("v", 3.0, "kill_rank", 3),
    ]
    conductor = Conductor(plan)
    conductor.due(1.0, world())
    slow = only(conductor.due(2.0, world()))
    assert told(slow) == [("slow", START, process(0)), ("slow", START, process(1))]
    assert {(order.severity, order.duration_s) for order in slow.operations} == {(2.0, 4.0)}
    assert phases(conductor.due(3.0, world())) == [("t", "suppressed"), ("u", "suppressed"), ("v", "executed")]
    assert only(conductor.due(6.0, world())).operations == (), "a slowdown ends by itself"


def test_partly_refused_is_executed_and_says_so() -> None:
    conductor = Conductor([fault("s", 2.0, "slow", 0, severity=2.0, duration_s=4.0, on_node=1)])
    report = conductor.outcome(only(conductor.due(2.0, world())), ["gone", None], 2.0)
    assert (report.phase, report.detail) == ("executed", "in part refused: gone")


def test_lost_node_comes_back_and_its_place_can_be_lost_again() -> None:
    plan = [fault("a", 1.0, "lose_node", 1), fault("b", 2.0, "lose_node", 0), fault("c", 20.0, "lose_node", 1)]
    conductor = Conductor(plan, repair_s=10.0)
    assert told(only(conductor.due(1.0, world()))) == [("lose_node", START, 1)]
    without = ChaosView({slot: occupant(slot) for slot in (0, 1)}, {0: (0, 1)}, True)
    refused = only(conductor.due(2.0, without)).report
    assert (refused.phase, "not back yet" in refused.detail) == ("suppressed", True)
    assert told(only(conductor.due(11.0, without))) == [("lose_node", HEAL, 1)]
    back = ChaosView(world().slots, {0: (0, 1), 7: (2, 3)}, True)
    assert told(only(conductor.due(20.0, back))) == [("lose_node", START, 7)], "the new node has taken the lost one's place"


def test_refused_node_loss_leaves_room_for_the_next() -> None:
    conductor = Conductor([fault("a", 1.0, "lose_node", 1), fault("b", 2.0, "lose_node", 0)], repair_s=10.0)
    conductor.outcome(only(conductor.due(1.0, world())), ["no such node"], 1.0)
    assert only(conductor.due(2.0, world())).report.phase == "executed"
    assert conductor.next_s() == 12.0, "only the second one is to be repaired"


def test_end_lets_everyone_go_on_and_reports_the_rest() -> None:
    plan = [
        fault("h", 1.0, "hang", 3, duration_s=50.0),
        fault("n", 1.0, "lose_node", 0),
        fault("s", 1.0, "slow", 2, severity=2.0, duration_s=50.0),
        fault("z", 99.0, "kill_rank", 1),
    ]
    conductor = Conductor(plan, repair_s=10.0)
    conductor.due(1.0, world())
    actions = conductor.end(5.0, world(running=False))
    assert phases(actions) == [("h", "healed"), ("n", "healed"), ("s", "healed"), ("z", "suppressed")]
    healed = [one for action in actions for one in told(action)]
    assert healed == [("hang", HEAL, process(3)), ("slow", HEAL, process(2))], "no node is added for a run that is over"
    assert conductor.next_s() == math.inf


def test_a_new_conductor_goes_on_from_the_journal() -> None:
    plan = [
        fault("a", 1.0, "kill_rank", 0),
        fault("h", 1.0, "hang", 3, duration_s=10.0),
        fault("i", 1.0, "hang", 2, duration_s=1.0),
        fault("n", 2.0, "lose_node", 5),
        fault("z", 8.0, "kill_rank", 1),
    ]
    first = Conductor(plan, repair_s=5.0)
    actions = [*first.due(1.0, world()), *first.due(2.0, world())]
    events = [*first.planned(0.0), *(replace(a.report, phase="aimed") for a in actions[:3]), *(a.report for a in actions)]
    records = [FaultRecord(event.fault, event.phase, event.at_s, event.members, event.detail) for event in events]
    assert [(r.fault.id, r.phase) for r in records[-2:]] == [("i", "healed"), ("n", "suppressed")]
    second = Conductor(plan, repair_s=5.0)
    second.recall(records)
    assert second.due(7.0, world()) == []
    assert phases(second.due(11.0, world())) == [("h", "healed"), ("z", "executed")]


def test_a_node_that_may_have_been_lost_is_brought_back() -> None:
    plan = [fault("n", 1.0, "lose_node", 1)]
    report = only(Conductor(plan, repair_s=5.0).due(1.0, world())).report
    second = Conductor(plan, repair_s=5.0)
    second.recall([FaultRecord(report.fault, "aimed", 101.0, report.members, "")], origin_s=100.0)
    assert second.due(5.9, world()) == []
    assert [order[:2] for order in told(only(second.due(6.0, world())))] == [("lose_node", HEAL)]


def test_conduct_performs_every_kind_of_operation_in_order() -> None:
    plan = [
        fault("h", 1.0, "hang", 0, duration_s=2.0),
        fault("k", 1.0, "kill_rank", 3),
        fault("r", 1.0, "kill_rank", 2),
        fault("s", 1.0, "slow", 1, severity=2.0, duration_s=1.0),
        fault("t", 1.5, "lose_node", 1),
    ]
    conductor, done = Conductor(plan, repair_s=1.0), list[tuple[str, str]]()

    def operate(order: Operation) -> str | None:
        if order.process == process(2):
            return "its pid is another process now"
        done.append((order.kind, order.phase))
        return None

    events = [e for now_s in (1.0, 1.5, 3.0) for e in conduct(conductor, conductor.due(now_s, world()), now_s, operate)]
    assert [(e.fault.id, e.phase) for e in events] == [
        ("h", "executed"), ("k", "executed"), ("r", "suppressed"), ("s", "executed"), ("t", "executed"),
        ("h", "healed"), ("s", "healed"), ("t", "healed"),
    ]  # fmt: skip
    assert done == [
        ("hang", START), ("kill_rank", START), ("slow", START), ("lose_node", START), ("hang", HEAL), ("lose_node", HEAL),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "heals"), [("flip_weight", False), ("nan", False), ("hang_loop", True), ("hold_gil", True)])
def test_a_process_is_told_to_spoil_itself_and_healed(kind: str, heals: bool) -> None:
    conductor = Conductor([fault("f", 1.0, kind, 1, duration_s=2.0)])
    struck = only(conductor.due(1.0, world()))
    assert told(struck) == [(kind, START, process(1))]
    assert struck.operations[0].duration_s == 2.0
    healed = only(conductor.due(conductor.next_s(), world()))
    assert healed.report.phase == "healed"
    assert told(healed) == ([(kind, HEAL, process(1))] if heals else [])


def test_silent_corruption_hits_the_place_that_its_name_draws() -> None:
    struck = [only(Conductor([fault(name, 1.0, "silent_corruption", 1)]).due(1.0, world())).operations[0] for name in "abcd"]
    assert {order.kind for order in struck} == set(KINDS["silent_corruption"].shows_as)


@pytest.mark.parametrize(("kind", "phase"), [("flip_weight", "suppressed"), ("silent_corruption", "suppressed"), ("nan", "executed")])
def test_no_bit_is_flipped_that_would_end_a_run_with_sharded_state(kind: str, phase: str) -> None:
    report = only(Conductor([fault("f", 1.0, kind, 1)], sharded=True).due(1.0, world())).report
    assert report.phase == phase
