from __future__ import annotations

import math
from dataclasses import replace

import pytest

from chaos.injector import ChaosView, FaultAction, Injector, Occupant
from fleet.protocol.facts import FaultRecord
from fleet.protocol.fault_kinds import KINDS
from fleet.protocol.operations import HEAD as HEAD_NODE
from fleet.protocol.operations import HEAL, START, Operation, operation
from fleet.protocol.types import Fault, Member, Process
from tests.support.injected import inject


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


def reported(action: FaultAction) -> list[tuple[str, str, Process | int | None]]:
    """(kind, phase, target) of each operation."""
    return [(order.kind, order.phase, order.process if order.process is not None else order.node) for order in action.operations]


def phases(actions: list[FaultAction]) -> list[tuple[str, str]]:
    return [(action.report.fault.id, action.report.phase) for action in actions]


def only(actions: list[FaultAction]) -> FaultAction:
    assert len(actions) == 1
    return actions[0]


def test_kills_at_its_time_and_once() -> None:
    injector = Injector([fault("k", 5.0, "kill_rank", 2)])
    assert injector.next_s() == 5.0
    assert injector.due(4.9, world()) == []
    action = only(injector.due(5.1, world()))
    kill = fault("k", 5.0, "kill_rank", 2)
    order = operation(kill, START, process=process(2))
    assert (order.fault, order.kind, order.phase, order.node) == ("k", "kill_rank", START, None)
    assert action == FaultAction(FaultRecord(kill, "executed", (Member(2, 0),), at_s=5.1), (order,))
    assert injector.outcome(action, [None], 5.2) == replace(action.report, at_s=5.2)
    assert injector.due(99.0, world()) == []
    assert injector.next_s() == math.inf


def test_planned_names_every_fault_in_order() -> None:
    injector = Injector([fault("b", 9.0, "hang", 1, duration_s=1.0), fault("a", 5.0, "kill_rank", 2)])
    assert [(e.fault.id, e.phase, e.at_s) for e in injector.planned(0.0)] == [("a", "planned", 0.0), ("b", "planned", 0.0)]


def test_a_refused_kill_was_suppressed_and_may_be_tried_on_the_next_one() -> None:
    injector = Injector([fault("k", 5.0, "kill_rank", 2), fault("l", 6.0, "kill_rank", 2)])
    report = injector.outcome(only(injector.due(5.0, world())), ["pid 102 started at tick 9, not 5002"], 5.0)
    assert report.phase == "suppressed"
    assert "tick 9" in report.detail
    assert only(injector.due(6.0, world())).report.phase == "executed"


@pytest.mark.parametrize(
    ("planned", "view", "says"),
    [
        (fault("f", 1.0, "kill_rank", 7), world(), "slot 7 has no live process"),
        (fault("f", 1.0, "kill_rank", 1), world(running=False), "does not train yet"),
        (fault("f", 1.0, "flip_weight", 1), ChaosView({0: occupant(0), 1: occupant(1)}, {0: (0, 1)}, True), "no majority"),
        (fault("f", 1.0, "lemon_node", 1), world(), "no operation yet"),
        (fault("f", 1.0, "lose_node", 5), world(), "node 5 does not exist"),
        (fault("f", 1.0, "lose_node", 0), ChaosView({0: occupant(0)}, {0: (0,)}, True), "last node"),
        (fault("f", 1.0, "slow", 4, severity=2.0, duration_s=1.0, on_node=1), world(), "node 4 has no live process"),
    ],
)
def test_suppresses_with_a_reason(planned: Fault, view: ChaosView, says: str) -> None:
    action = only(Injector([planned]).due(1.0, view))
    assert (action.report.phase, action.operations, action.report.members) == ("suppressed", (), ())
    assert says in action.report.detail


@pytest.mark.parametrize("kind", ["kill_rank", "hang", "lose_node"])
def test_never_leaves_fewer_ranks_than_the_run_needs(kind: str) -> None:
    fault_planned = fault("f", 1.0, kind, 1, duration_s=1.0)
    left = 2 if kind == "lose_node" else 3
    assert only(Injector([fault_planned], min_ranks=left).due(1.0, world())).report.phase == "executed"
    refused = only(Injector([fault_planned], min_ranks=left + 1).due(1.0, world())).report
    assert (refused.phase, refused.detail) == ("suppressed", f"it would leave {left} ranks of at least {left + 1}")


def test_loses_all_ranks_where_asked_for_and_only_when_something_can_bring_them_back() -> None:
    crash = Fault("c", 1.0, "software", "kill_rank", slot=2)
    assert only(Injector([crash]).due(1.0, world())).report.members == (Member(2, 0),), "not asked for"
    refused = only(Injector([crash], lose_all=True).due(1.0, world())).report
    assert (refused.phase, refused.members) == ("suppressed", ())
    assert refused.detail == "it would leave 0 ranks, and neither memory nor store holds a state to go on from"
    action = only(Injector([crash], lose_all=True).due(1.0, replace(world(), restorable=True)))
    assert reported(action) == [("kill_rank", START, process(slot)) for slot in range(4)]
    assert action.report.members == tuple(Member(slot, 0) for slot in range(4))
    plan = [fault(f"k{slot}", 1.0, "kill_rank", slot) for slot in range(4)]
    assert len(Injector(plan, lose_all=True).due(1.0, replace(world(), restorable=True))) == 4


def test_counts_what_it_has_just_killed_though_the_view_is_stale() -> None:
    plan = [fault(f"k{slot}", 1.0, "kill_rank", slot) for slot in range(4)]
    injector = Injector(plan, min_ranks=2)
    assert phases(injector.due(1.0, world())) == [("k0", "executed"), ("k1", "executed"), ("k2", "suppressed"), ("k3", "suppressed")]
    again = Injector([fault("a", 1.0, "kill_rank", 0), fault("b", 1.1, "kill_rank", 0)])
    again.due(1.0, world())
    assert only(again.due(1.1, world())).report.detail == "slot 0 has no live process"


def test_a_spare_may_die_even_when_every_rank_is_needed() -> None:
    view = ChaosView({**world().slots, 4: occupant(4, in_view=False)}, {0: (0, 1), 1: (2, 3, 4)}, True)
    assert only(Injector([fault("k", 1.0, "kill_rank", 4)], min_ranks=4).due(1.0, view)).report.phase == "executed"


def test_hang_ends_with_a_resume() -> None:
    injector = Injector([fault("h", 1.0, "hang", 3, duration_s=2.0)])
    assert reported(only(injector.due(1.0, world()))) == [("hang", START, process(3))]
    assert injector.next_s() == 3.0
    assert injector.due(2.9, world()) == []
    heal = only(injector.due(3.0, world()))
    assert (heal.report.phase, heal.report.members, reported(heal)) == ("healed", (Member(3, 0),), [("hang", HEAL, process(3))])


def test_hang_that_was_evicted_heals_without_touching_the_replacement() -> None:
    injector = Injector([fault("h", 1.0, "hang", 3, duration_s=2.0)])
    injector.due(1.0, world())
    replaced = ChaosView({**world().slots, 3: occupant(3, 1)}, world().nodes, True)
    heal = only(injector.due(3.0, replaced))
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
    injector = Injector(plan)
    injector.due(1.0, world())
    slow = only(injector.due(2.0, world()))
    assert reported(slow) == [("slow", START, process(0)), ("slow", START, process(1))]
    assert {(order.severity, order.duration_s) for order in slow.operations} == {(2.0, 4.0)}
    assert phases(injector.due(3.0, world())) == [("t", "suppressed"), ("u", "suppressed"), ("v", "executed")]
    assert only(injector.due(6.0, world())).operations == (), "a slowdown ends by itself"


def test_partly_refused_is_executed_and_says_so() -> None:
    injector = Injector([fault("s", 2.0, "slow", 0, severity=2.0, duration_s=4.0, on_node=1)])
    report = injector.outcome(only(injector.due(2.0, world())), ["gone", None], 2.0)
    assert (report.phase, report.detail) == ("executed", "in part refused: gone")


def test_lost_node_comes_back_and_its_place_can_be_lost_again() -> None:
    plan = [fault("a", 1.0, "lose_node", 1), fault("b", 2.0, "lose_node", 0), fault("c", 20.0, "lose_node", 1)]
    injector = Injector(plan, repair_s=10.0)
    assert reported(only(injector.due(1.0, world()))) == [("lose_node", START, 1)]
    without = ChaosView({slot: occupant(slot) for slot in (0, 1)}, {0: (0, 1)}, True)
    refused = only(injector.due(2.0, without)).report
    assert (refused.phase, "not back yet" in refused.detail) == ("suppressed", True)
    assert reported(only(injector.due(11.0, without))) == [("lose_node", HEAL, 1)]
    back = ChaosView(world().slots, {0: (0, 1), 7: (2, 3)}, True)
    assert reported(only(injector.due(20.0, back))) == [("lose_node", START, 7)], "the new node has taken the lost one's place"


def test_refused_node_loss_leaves_room_for_the_next() -> None:
    injector = Injector([fault("a", 1.0, "lose_node", 1), fault("b", 2.0, "lose_node", 0)], repair_s=10.0)
    injector.outcome(only(injector.due(1.0, world())), ["no such node"], 1.0)
    assert only(injector.due(2.0, world())).report.phase == "executed"
    assert injector.next_s() == 12.0, "only the second one is to be repaired"


def test_end_lets_everyone_go_on_and_reports_the_rest() -> None:
    plan = [
        fault("h", 1.0, "hang", 3, duration_s=50.0),
        fault("n", 1.0, "lose_node", 0),
        fault("s", 1.0, "slow", 2, severity=2.0, duration_s=50.0),
        fault("z", 99.0, "kill_rank", 1),
    ]
    injector = Injector(plan, repair_s=10.0)
    injector.due(1.0, world())
    actions = injector.end(5.0, world(running=False))
    assert phases(actions) == [("h", "healed"), ("n", "healed"), ("s", "healed"), ("z", "suppressed")]
    healed = [one for action in actions for one in reported(action)]
    assert healed == [("hang", HEAL, process(3)), ("slow", HEAL, process(2))], "no node is added for a run that is over"
    assert injector.next_s() == math.inf


def test_conduct_performs_every_kind_of_operation_in_order() -> None:
    plan = [
        fault("h", 1.0, "hang", 0, duration_s=2.0),
        fault("k", 1.0, "kill_rank", 3),
        fault("r", 1.0, "kill_rank", 2),
        fault("s", 1.0, "slow", 1, severity=2.0, duration_s=1.0),
        fault("t", 1.5, "lose_node", 1),
    ]
    injector, done = Injector(plan, repair_s=1.0), list[tuple[str, str]]()

    def operate(order: Operation) -> str | None:
        if order.process == process(2):
            return "its pid is another process now"
        done.append((order.kind, order.phase))
        return None

    events = [e for now_s in (1.0, 1.5, 3.0) for e in inject(injector, injector.due(now_s, world()), now_s, operate)]
    assert [(e.fault.id, e.phase) for e in events] == [
        ("h", "executed"), ("k", "executed"), ("r", "suppressed"), ("s", "executed"), ("t", "executed"),
        ("h", "healed"), ("s", "healed"), ("t", "healed"),
    ]  # fmt: skip
    assert done == [
        ("hang", START), ("kill_rank", START), ("slow", START), ("lose_node", START), ("hang", HEAL), ("lose_node", HEAL),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "heals"), [("flip_weight", False), ("nan", False), ("hang_loop", True), ("hold_gil", True)])
def test_a_process_is_told_to_spoil_itself_and_healed(kind: str, heals: bool) -> None:
    injector = Injector([fault("f", 1.0, kind, 1, duration_s=2.0)])
    injected = only(injector.due(1.0, world()))
    assert reported(injected) == [(kind, START, process(1))]
    assert injected.operations[0].duration_s == 2.0
    healed = only(injector.due(injector.next_s(), world()))
    assert healed.report.phase == "healed"
    assert reported(healed) == ([(kind, HEAL, process(1))] if heals else [])


def test_silent_corruption_hits_the_place_that_its_name_draws() -> None:
    orders = [only(Injector([fault(name, 1.0, "silent_corruption", 1)]).due(1.0, world())).operations[0] for name in "abcd"]
    assert {order.kind for order in orders} == set(KINDS["silent_corruption"].shows_as)


@pytest.mark.parametrize(("kind", "phase"), [("flip_gradient", "suppressed"), ("silent_corruption", "executed"), ("nan", "executed")])
def test_no_shard_is_made_wrong_where_none_is_computed_again(kind: str, phase: str) -> None:
    report = only(Injector([fault("f", 1.0, kind, 1)], sharded=True).due(1.0, world())).report
    assert report.phase == phase


# ---- links and racks ---------------------------------------------------------------------------------------------------------------------


def three_nodes(**domains: str) -> ChaosView:
    """Two ranks on each of three nodes; ``n0``, ``n1``, ... name their domain paths."""
    nodes = {node: (2 * node, 2 * node + 1) for node in range(3)}
    paths = {int(name[1:]): path for name, path in domains.items()}
    hosts = {node: f"10.0.0.{node}" for node in range(3)} | {HEAD_NODE: "10.0.0.9"}
    return ChaosView({slot: occupant(slot) for slot in range(6)}, nodes, True, domains=paths, hosts=hosts)


def test_a_link_is_cut_at_both_ends_and_at_the_nodes_own_last() -> None:
    injector = Injector([fault("p", 1.0, "partition", 1, on_node=1, duration_s=9.0)])
    action = only(injector.due(1.0, three_nodes()))
    assert [(order.node, order.hosts, order.is_target, order.duration_s) for order in action.operations] == [
        (0, ("10.0.0.1",), False, 9.0),
        (2, ("10.0.0.1",), False, 9.0),
        (1, ("10.0.0.0", "10.0.0.2", "10.0.0.9"), True, 9.0),
    ]
    assert action.report.members == (Member(2, 0), Member(3, 0))
    healed = only(injector.due(10.0, three_nodes()))
    assert healed.report.phase == "healed" and not healed.operations, "agents do that by themselves: nobody may reach them"


def test_what_is_cut_when_the_run_ends_is_mended_at_both_ends() -> None:
    injector = Injector([fault("p", 1.0, "flap", 1, on_node=1, duration_s=60.0)])
    injector.due(1.0, three_nodes())
    action = only(injector.end(5.0, three_nodes()))
    assert [(order.kind, order.phase, order.node) for order in action.operations] == [("flap", HEAL, node) for node in (0, 2, 1)]


def test_a_node_that_is_cut_off_counts_as_gone_for_as_long_as_it_is() -> None:
    faults = [fault("p", 1.0, "partition", 0, on_node=1, duration_s=9.0), fault("k", 2.0, "kill_rank", 2), fault("l", 20.0, "kill_rank", 2)]
    injector = Injector(faults, min_ranks=4)
    assert phases(injector.due(1.0, three_nodes())) == [("p", "executed")]
    assert phases(injector.due(2.0, three_nodes())) == [("k", "suppressed")], "it would leave three of at least four"
    assert phases(injector.due(20.0, three_nodes())) == [("p", "healed"), ("l", "executed")]


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ({0: "a", 1: "a", 2: "a", HEAD_NODE: "a"}, "the same address as 3 others"),
        ({0: "a", 1: "b", 2: "c", HEAD_NODE: "b"}, "the same address as the head"),
        ({0: "a", 2: "c", HEAD_NODE: "h"}, "has no agent"),
    ],
)
def test_links_are_cut_between_hosts_or_not_at_all(hosts: dict[int, str], why: str) -> None:
    injector = Injector([fault("p", 1.0, "partition", 1, on_node=1, duration_s=9.0)])
    action = only(injector.due(1.0, replace(three_nodes(), hosts=hosts)))
    assert action.report.phase == "suppressed" and why in action.report.detail and not action.operations


def nameless(kind: str) -> Fault:
    return Fault("n", 1.0, "test", kind, duration_s=9.0, delay_s=0.05)


def test_the_coordinator_is_cut_off_at_every_node_where_none_is_on_its_host() -> None:
    view = replace(three_nodes(), hosts={0: "a", 2: "c", HEAD_NODE: "h"})
    action = only(Injector([nameless("isolate_coordinator")]).due(1.0, view))
    assert [(order.node, order.hosts, order.is_target) for order in action.operations] == [(0, ("h",), False), (2, ("h",), False)]
    assert action.report.members == ()
    for hosts in ({0: "a", 1: "h", 2: "c", HEAD_NODE: "h"}, {0: "h", 1: "h", 2: "h", HEAD_NODE: "h"}):
        refused = only(Injector([nameless("isolate_coordinator")]).due(1.0, replace(view, hosts=hosts)))
        assert "not every node has an address of its own" in refused.report.detail and not refused.operations


def test_the_store_is_cut_off_at_every_node_and_healed_by_order_where_that_tells_what_was_applied() -> None:
    injector = Injector([nameless("store_slow")])
    action = only(injector.due(1.0, three_nodes()))
    assert [(order.node, order.delay_s) for order in action.operations] == [(node, 0.05) for node in range(3)]
    assert [(order.node, order.phase) for order in only(injector.due(10.0, three_nodes())).operations] == [(n, HEAL) for n in range(3)]


def test_a_rank_is_cut_off_from_all_hosts_but_its_own() -> None:
    injector = Injector([fault("i", 1.0, "isolate_rank", 2, duration_s=9.0)])
    [order] = only(injector.due(1.0, three_nodes())).operations
    assert (order.process, order.hosts, order.is_target) == (process(2), ("10.0.0.0", "10.0.0.2", "10.0.0.9"), True)
    alone = replace(three_nodes(), hosts=dict.fromkeys((0, 1, 2, HEAD_NODE), "h"))
    assert "the same address" in only(Injector([fault("i", 1.0, "isolate_rank", 2, duration_s=9.0)]).due(1.0, alone)).report.detail


def test_a_rail_is_the_ranks_at_one_place_of_each_node_of_a_rack() -> None:
    def hit(view: ChaosView, slot: int) -> tuple[int, ...]:
        report = only(Injector([fault("r", 1.0, "rail", slot, duration_s=9.0)]).due(1.0, view)).report
        return tuple(member.slot for member in report.members) if report.phase == "executed" else ()

    assert hit(three_nodes(), 3) == hit(three_nodes(n0="x", n1="y", n2="z"), 3) == (1, 3, 5), "of all nodes where no rack is known"
    racks = three_nodes(n0="a", n1="a", n2="b")
    assert hit(racks, 0) == (0, 2)
    assert not hit(racks, 4), "no other node of its rack"
    action = only(Injector([fault("r", 1.0, "rail", 1, duration_s=9.0)]).due(1.0, racks))
    assert [(order.kind, order.process, order.hosts) for order in action.operations] == [
        ("rail", process(1), ("10.0.0.1", "10.0.0.2", "10.0.0.9")), ("rail", process(3), ("10.0.0.0", "10.0.0.2", "10.0.0.9")),
    ]  # fmt: skip


def test_nodes_of_one_burst_are_lost_beside_each_other_and_another_waits() -> None:
    faults = [replace(fault(name, at_s, "lose_node", 0), node=node) for name, at_s, node in (("a", 1.0, 0), ("a+1", 2.0, 1), ("b", 3.0, 2))]
    injector = Injector(faults, repair_s=60.0)
    assert phases(injector.due(1.0, three_nodes())) == [("a", "executed")]
    view = replace(three_nodes(), nodes={1: (2, 3), 2: (4, 5)})
    assert phases(injector.due(2.0, view)) == [("a+1", "executed")]
    apart = only(Injector([faults[0], replace(faults[1], id="c")], repair_s=60.0).due(1.5, three_nodes()))
    assert apart.report.phase == "executed"
    report = only(injector.due(3.0, replace(view, nodes={2: (4, 5), 3: (6, 7)}))).report
    assert report.phase == "suppressed" and "not back yet" in report.detail


def test_a_node_without_an_agent_is_passed_over_and_the_heads_address_is_named_once() -> None:
    injector = Injector([fault("p", 1.0, "partition", 1, on_node=1, duration_s=9.0)])
    view = replace(three_nodes(), hosts={0: "h", 1: "b", HEAD_NODE: "h"})
    action = only(injector.due(1.0, view))
    assert [(order.node, order.hosts) for order in action.operations] == [(0, ("b",)), (1, ("h",))]


def test_chaos_that_is_called_off_heals_all_and_strikes_no_more() -> None:
    faults = [fault("l", 1.0, "lose_node", 1), fault("h", 2.0, "hang", 0, duration_s=60.0), fault("k", 99.0, "kill_rank", 5)]
    injector = Injector(faults, repair_s=60.0)
    injector.due(1.0, three_nodes())
    left = ChaosView({slot: occupant(slot) for slot in (0, 1, 4, 5)}, {0: (0, 1), 2: (4, 5)}, True)
    injector.due(2.0, left)
    actions = injector.call_off(3.0, left, "it costs too much")
    assert {order[:2] for action in actions for order in reported(action)} == {("lose_node", HEAL), ("hang", HEAL)}
    assert phases(actions) == [("l", "healed"), ("h", "healed"), ("k", "suppressed")]
    injector.pause(False)
    injector.add([fault("again", 4.0, "kill_rank", 4)], 4.0)
    action = only(injector.due(4.0, left))
    assert action.report.phase == "suppressed" and "called off: it costs too much" in action.report.detail


def test_a_rack_is_all_nodes_of_the_widest_domain() -> None:
    view = three_nodes(n0="rack-a/host-0", n1="rack-b/host-1", n2="rack-a/host-2")
    injector = Injector([fault("r", 1.0, "rack", 2, on_node=1)], repair_s=5.0)
    action = only(injector.due(1.0, view))
    assert reported(action) == [("rack", START, 0), ("rack", START, 2)]
    assert action.report.members == tuple(Member(slot, 0) for slot in (0, 1, 4, 5))
    left = ChaosView({slot: occupant(slot) for slot in (2, 3)}, {1: (2, 3)}, True)
    assert reported(only(injector.due(6.0, left))) == [("rack", HEAL, 0), ("rack", HEAL, 2)], "each node comes back"


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (three_nodes(), "no other node is known to be in the rack"),
        (three_nodes(n0="a/x", n1="b/y", n2="c/z"), "no other node is known to be in the rack"),
        (three_nodes(n0="a/x", n1="a/y", n2="a/z"), "it is the last node"),
    ],
)
def test_a_rack_that_is_not_known_or_is_everything_is_left_alone(view: ChaosView, why: str) -> None:
    action = only(Injector([fault("r", 1.0, "rack", 0, on_node=1)]).due(1.0, view))
    assert action.report.phase == "suppressed" and why in action.report.detail


def test_what_stops_a_daemon_keeps_no_other_fault_from_its_ranks() -> None:
    faults = [fault("r", 1.0, "stop_raylet", 0, on_node=1, duration_s=9.0), fault("h", 2.0, "hang", 0, duration_s=1.0)]
    injector = Injector([*faults, fault("i", 2.5, "hang", 0, duration_s=1.0)])
    assert phases(injector.due(1.0, three_nodes())) == [("r", "executed")]
    assert phases(injector.due(2.0, three_nodes())) == [("h", "executed")]
    assert phases(injector.due(2.5, three_nodes())) == [("i", "suppressed")], "it is stopped already"


def test_the_death_of_the_controller_takes_all_ranks_and_needs_something_to_go_on_from() -> None:
    refused = only(Injector([nameless("kill_controller")]).due(1.0, three_nodes()))
    assert refused.report.phase == "suppressed" and "neither memory nor store" in refused.report.detail
    action = only(Injector([nameless("kill_controller")]).due(1.0, replace(three_nodes(), restorable=True)))
    assert len(action.report.members) == 6 and [(order.kind, order.node) for order in action.operations] == [("kill_controller", HEAD_NODE)]


# ---- ranks that compute a shard together -------------------------------------------------------------------------------------------------


def meshed() -> ChaosView:
    """Two groups of two: slots 0 and 1, 2 and 3, and a spare without a coordinate."""
    there = {slot: Occupant(Member(slot, 0, (("tensor", slot % 2),)), process(slot), True) for slot in range(4)}
    return ChaosView({**there, 4: occupant(4, in_view=False)}, {0: (0, 1, 4), 1: (2, 3)}, True)


@pytest.mark.parametrize("slot", range(5))
def test_a_fault_strikes_a_rank_at_the_coordinate_that_is_set(slot: int) -> None:
    action = only(Injector([fault("k", 1.0, "kill_rank", slot)], at=(("tensor", 1),)).due(1.0, meshed()))
    assert [member.slot for member in action.report.members] == [(1, 3)[slot % 2]]


def test_the_last_rank_at_a_coordinate_is_not_taken_unless_all_may_be() -> None:
    """No other rank holds that part of the model."""
    plan = [fault("a", 1.0, "kill_rank", 1), fault("b", 2.0, "kill_rank", 3), fault("c", 3.0, "kill_rank", 2)]
    injector = Injector(plan)
    assert [action.report.phase for action in injector.due(3.0, meshed())] == ["executed", "suppressed", "executed"]
    sole = only(Injector([fault("n", 1.0, "lose_node", 1)], min_ranks=2, max_nodes_down=1).due(1.0, meshed()))
    assert sole.report.phase == "executed"
    brave = Injector(plan, lose_all=True)
    restorable = replace(meshed(), restorable=True)
    assert [action.report.phase for action in brave.due(3.0, restorable)] == ["executed"] * 3
    why = only(Injector(plan[1:2]).due(2.0, replace(meshed(), slots={slot: o for slot, o in meshed().slots.items() if slot != 1})))
    assert "no rank at tensor=1" in why.report.detail


def test_a_rank_is_made_wrong_only_where_others_hold_the_same_part() -> None:
    wrong = only(Injector([fault("w", 1.0, "flip_weight", 0)]).due(1.0, meshed()))
    assert (wrong.report.phase, "there is no majority" in wrong.report.detail) == ("suppressed", True)
