"""Turns a plan into operations, and every planned fault into a report of its outcome.

The injector does no I/O and reads no clock: it reads a frozen ``ChaosView``, returns operations as data, and receives their outcome. The
journal has all its actions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from chaos.arrivals import burst_of
from chaos.radius import BlastLimit, BlastRadius, FaultReach
from fleet.protocol.domains import place_of
from fleet.protocol.facts import FaultRecord
from fleet.protocol.fault_kinds import BY_HAND, KNOWN_S, Cost, FaultKind, FaultPlace, Heal, Performer, drawn, kind_of
from fleet.protocol.operations import ANNOUNCE, HEAL, START, WITHDRAW, Operation, operation
from fleet.protocol.operations import HEAD as HEAD_NODE
from fleet.protocol.operations import STORE as STORE_NODE
from fleet.protocol.types import Coordinate, Fault, Member, Process, in_words

JOB_WIDE = "software"
"""The component of the catalogue whose blast radius is the job."""

ONE_OF = {FaultPlace.COORDINATOR: HEAD_NODE, FaultPlace.STORE: STORE_NODE}
"""Places that exist once in a run, and their stand-in for a node's index."""

WITNESSES = 3
"""The least number of replicas that can tell which one is wrong."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """The process that fills a slot now. ``in_view``: whether it trains; else it is a spare or still starting."""

    member: Member
    process: Process
    in_view: bool


@dataclass(frozen=True, slots=True)
class ChaosView:
    """Chaos's view of the run: live slots, the slots on each live worker node (by the node's index), and whether the run trains.

    ``restorable``: whether a copy in memory or a durable checkpoint could bring it back if all ranks were lost. It also has the domain path
    of each node, and addresses: of each node that has an agent, and of the coordinator's host (``HEAD``).
    """

    slots: Mapping[int, Occupant]
    nodes: Mapping[int, tuple[int, ...]]
    running: bool
    restorable: bool = False
    domains: Mapping[int, str] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)

    def node_of(self, slot: int) -> int | None:
        """The index of the slot's node; None while it is on none."""
        return next((node for node, slots in self.nodes.items() if slot in slots), None)

    def rack(self, node: int) -> tuple[int, ...]:
        """The live nodes of the widest domain that ``node`` is in, with itself."""
        widest = place_of(self.domains.get(node, ""))[:1]
        return tuple(each for each in self.nodes if each == node or (widest and place_of(self.domains.get(each, ""))[:1] == widest))

    def rail(self, slot: int) -> tuple[int, ...]:
        """The slots at the same place of their nodes as ``slot``, on the nodes of its rack, or on all nodes without a known rack."""
        home = self.node_of(slot)
        if home is None:
            return ()
        alone = all(self.rack(node) == (node,) for node in self.nodes)
        nodes = tuple(self.nodes) if alone else self.rack(home)
        place = sorted(self.nodes[home]).index(slot)
        return tuple(sorted(self.nodes[node])[place] for node in nodes if place < len(self.nodes[node]))


@dataclass(frozen=True, slots=True)
class FaultAction:
    """Perform ``operations``, hand their outcome to :meth:`Injector.outcome`, and send the event that it returns."""

    report: FaultRecord
    operations: tuple[Operation, ...] = ()


@dataclass(slots=True)
class _Open:
    """An executed fault that has a heal to come."""

    fault: Fault
    members: tuple[Member, ...]
    until_s: float
    nodes: tuple[int, ...] = ()


class Injector:
    """Executes, suppresses and heals the faults of ``plan``.

    Args:
        plan: the run's faults.
        min_ranks: the run's least number of ranks; a fault that would leave fewer of those in view is suppressed.
        repair_s: time until a lost node comes back; None: never.
        max_nodes_down: how many nodes may be lost at a time; with more there is no room for replacements.
        lose_all: all ranks may be lost when there is a state to go on from; a fault of software then takes them all.
        sharded: the optimizer's state is spread over the ranks. No rank computes a shard again then, so chaos makes no shard wrong.
        limits: how much may be hit, at once and within an hour. A fault that would hit more is suppressed.
        at: faults of a rank strike ranks at this coordinate alone, where several ranks compute a shard together; empty: any rank.
    """

    def __init__(
        self, plan: Iterable[Fault], *, min_ranks: int = 1, repair_s: float | None = None, max_nodes_down: int = 1, lose_all: bool = False,
        sharded: bool = False, limits: Iterable[BlastLimit] = (), at: Coordinate = (),
    ) -> None:  # fmt: skip
        self._radius = BlastRadius(limits)
        self._ahead = sorted(plan, key=lambda fault: (fault.at_s, fault.id), reverse=True)
        self._min_ranks, self._repair_s, self._max_nodes_down, self._lose_all = min_ranks, repair_s, max_nodes_down, lose_all
        self._sharded, self._at = sharded, at
        self._open: dict[str, _Open] = {}
        self._announced: dict[str, _Open] = {}
        self._gone: set[Member] = set()
        self._down: set[str] = set()
        self._place: dict[int, int] = {}
        self._paused, self._called_off, self._heal_now = False, "", False

    def planned(self, now_s: float) -> list[FaultRecord]:
        """One report for each fault still ahead: send them once, before the first is due."""
        return [FaultRecord(fault, "planned", (), at_s=now_s) for fault in reversed(self._ahead)]

    def add(self, faults: Iterable[Fault], now_s: float) -> list[FaultRecord]:
        """Plan more faults; one report for each."""
        more = list(faults)
        self._ahead = sorted([*self._ahead, *more], key=lambda fault: (fault.at_s, fault.id), reverse=True)
        return [FaultRecord(fault, "planned", (), at_s=now_s) for fault in more]

    def pause(self, paused: bool) -> None:
        """While paused, planned faults that are due are suppressed; faults ordered by hand are not."""
        self._paused = paused

    def heal_all(self) -> None:
        """Heal at the next turn all faults that last."""
        self._heal_now = True

    def next_s(self) -> float:
        """The time of the next action; infinity when none is left."""
        if self._heal_now:
            return -math.inf
        times = [opened.until_s for opened in (*self._open.values(), *self._announced.values())]
        if self._ahead:
            times.append(self._ahead[-1].at_s)
        return min(times, default=float("inf"))

    def due(self, now_s: float, world: ChaosView) -> list[FaultAction]:
        """Actions due at ``now_s``, heals first. The caller must give back each action's outcome before the next call."""
        self._settle(world)
        over = [opened for opened in self._open.values() if opened.until_s <= now_s or (self._heal_now and _can_be_healed(opened.fault))]
        actions, self._heal_now = [self._heal(opened, now_s, world) for opened in over], False
        actions += [self._carry_out(announced, now_s, world) for announced in list(self._announced.values()) if announced.until_s <= now_s]
        while self._ahead and self._ahead[-1].at_s <= now_s:
            actions.append(self._inject(self._ahead.pop(), now_s, world))
        return actions

    def end(self, now_s: float, world: ChaosView) -> list[FaultAction]:
        """The run is over: let every stopped process go on, and report the faults that were never executed."""
        return self._heal_all(now_s, world, "the run ended before it was due", over=True)

    def call_off(self, now_s: float, world: ChaosView, why: str) -> list[FaultAction]:
        """The run goes on without faults from now on, also without ordered ones: heal all. An unreachable process heals in its time."""
        self._called_off = f"chaos was called off: {why}"
        return self._heal_all(now_s, world, self._called_off, over=False)

    def _heal_all(self, now_s: float, world: ChaosView, why: str, *, over: bool) -> list[FaultAction]:
        self._settle(world)
        actions = [self._heal(opened, now_s, world, over=over) for opened in list(self._open.values())]
        actions += [self._withdraw(announced, now_s, why, over) for announced in list(self._announced.values())]
        while self._ahead:
            actions.append(_suppressed(self._ahead.pop(), now_s, why))
        return actions

    def outcome(self, action: FaultAction, refusals: Iterable[str | None], now_s: float) -> FaultRecord:
        """The event to send, once ``action`` was performed. When all its operations are refused, an executed fault becomes a suppressed
        one.

        ``refusals`` has one answer for each operation: the reason of the refusal, or None.
        """
        report, answers = replace(action.report, at_s=now_s), list(refusals)
        refused = [why for why in answers if why is not None]
        if not refused:
            return report
        detail = "; ".join(refused)
        if report.phase in ("announced", "executed") and len(refused) == len(answers):
            self._forget(report)
            return replace(report, phase="suppressed", detail=f"refused: {detail}")
        return replace(report, detail=f"{report.detail}; in part refused: {detail}".lstrip("; "))

    # ---- strike ------------------------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, now_s: float, world: ChaosView) -> FaultAction:
        kind = drawn(fault)
        why = self._common_refusal(fault, kind, world)
        if why is None and kind.targets[0] in ONE_OF:
            return self._inject_only(fault, kind, now_s, world)
        if why is None and kind.unit is FaultPlace.NODE:
            return self._inject_node(fault, kind, now_s, world)
        targets = self._targets(fault, kind, world)
        why = why or self._rank_refusal(fault, kind, targets, world)
        members = tuple(target.member for target in targets)
        node = self._node(fault.node, world)
        nodes = () if node is None else (node,)
        why = why or self._too_wide(fault, members, nodes, now_s, world)
        if why is not None:
            return _suppressed(fault, now_s, why)
        self._opened(fault, members, now_s, nodes)
        return FaultAction(FaultRecord(fault, "executed", members, at_s=now_s), _to_ranks(fault, kind, START, targets, world))

    def _inject_only(self, fault: Fault, kind: FaultKind, now_s: float, world: ChaosView) -> FaultAction:
        """Strike a place that exists once in a run. For a fault of links, every node is cut off from it."""
        hit = ONE_OF[kind.targets[0]]
        orders = _orders(fault, kind, START, (hit,), world)
        beside = [node for node, host in world.hosts.items() if node != hit and host == world.hosts.get(hit)]
        if kind.performer is Performer.LINKS and (beside or not orders):
            return _suppressed(fault, now_s, "not every node has an address of its own: links are cut between hosts")
        deadly = Cost.DEATH in kind.may_cost
        if deadly and not world.restorable:
            return _suppressed(fault, now_s, "all ranks would be lost, and neither memory nor store holds a state to go on from")
        members = tuple(occupant.member for occupant in world.slots.values()) if deadly else ()
        if why := self._too_wide(fault, members, (), now_s, world):
            return _suppressed(fault, now_s, why)
        self._opened(fault, members, now_s, (hit,))
        return FaultAction(FaultRecord(fault, "executed", members, at_s=now_s), orders)

    def _common_refusal(self, fault: Fault, kind: FaultKind, world: ChaosView) -> str | None:
        if kind.performer is None:
            return f"{fault.kind} has no operation yet: {kind.why_not}"
        if self._called_off:
            return self._called_off
        if self._paused and fault.component != BY_HAND:
            return "chaos was stopped by an operator"
        return None if world.running else "the run does not train yet"

    def _rank_refusal(self, fault: Fault, kind: FaultKind, targets: list[Occupant], world: ChaosView) -> str | None:
        where = f"slot {fault.slot}" if fault.slot is not None else f"node {fault.node}"
        where = in_words(self._at) if self._at and not targets else where
        if not targets:
            return f"{where} has no live process"
        if kind.performer is Performer.LINKS and (why := _no_far_host(targets, world)):
            return why
        if kind.whole_rail and len(targets) == 1:
            return f"{where} is alone on its rail: no other node of its rack has a rank there"
        held = {member for opened in self._open.values() for member in opened.members if _holds_up(opened.fault)}
        if Cost.DEATH not in kind.may_cost and any(target.member in held for target in targets):
            return f"{where} is already stopped or slowed"
        wrong = Cost.WRONG in kind.may_cost
        if self._sharded and kind.needs_verify:
            return "state is sharded, so no rank computes a shard again: the wrong gradient would be in the state of all"
        if wrong and any(
            sum(target.member.coordinate == one.coordinate for one in self._training(world)) < WITNESSES for target in targets
        ):
            return f"fewer than {WITNESSES} ranks train: there is no majority to tell which one is wrong"
        return self._too_few(targets, world) if kind.takes_ranks else None

    def _inject_node(self, fault: Fault, kind: FaultKind, now_s: float, world: ChaosView) -> FaultAction:
        index = self._node(fault.node, world)
        if index is None:
            return _suppressed(fault, now_s, f"node {fault.node} does not exist")
        hit = world.rack(index) if kind.whole_rack else (index,)
        targets = [world.slots[slot] for node in hit for slot in world.nodes[node] if slot in world.slots]
        why = self._no_room(fault, hit, world) if Cost.NODE in kind.may_cost else None
        if kind.whole_rack and len(hit) == 1:
            why = f"no other node is known to be in the rack of node {index}: name the racks' label in the setting domains"
        if kind.performer is Performer.LINKS:
            why = _alone_at(index, world)
        why = why or (self._too_few(targets, world) if kind.takes_ranks else None)
        members = tuple(target.member for target in targets)
        why = why or self._too_wide(fault, members, hit, now_s, world)
        if why is not None:
            return _suppressed(fault, now_s, why)
        if kind.announced and fault.id not in self._announced:
            self._announced[fault.id] = _Open(fault, members, now_s + fault.duration_s, hit)
            self._radius.count(fault.id, _reach(fault, members, hit, now_s))
            return FaultAction(FaultRecord(fault, "announced", members, at_s=now_s), _orders(fault, kind, ANNOUNCE, hit, world))
        self._opened(fault, members, now_s, hit)
        return FaultAction(FaultRecord(fault, "executed", members, at_s=now_s), _orders(fault, kind, START, hit, world))

    def _carry_out(self, announced: _Open, now_s: float, world: ChaosView) -> FaultAction:
        """Carry out an announced fault now, if it still may strike."""
        action = self._inject(announced.fault, now_s, world)
        del self._announced[announced.fault.id]
        return action if action.operations else self._taken_back(announced, action.report)

    def _withdraw(self, announced: _Open, now_s: float, why: str, over: bool) -> FaultAction:
        del self._announced[announced.fault.id]
        report = FaultRecord(announced.fault, "suppressed", (), why, at_s=now_s)
        return FaultAction(report) if over else self._taken_back(announced, report)

    def _taken_back(self, announced: _Open, report: FaultRecord) -> FaultAction:
        """Tell the run that the announced fault does not come."""
        self._radius.forget(announced.fault.id)
        return FaultAction(report, tuple(operation(announced.fault, WITHDRAW, node=node) for node in announced.nodes))

    def _no_room(self, fault: Fault, hit: tuple[int, ...], world: ChaosView) -> str | None:
        """The reason why no more nodes may be lost. Nodes of one burst count as one, like those of a rack."""
        if len({burst_of(name) for name in self._down} - {burst_of(fault.id)}) >= self._max_nodes_down:
            return f"{len(self._down)} lost nodes are not back yet: there is no room for the ranks of another"
        return "it is the last node" if len(world.nodes) <= len(hit) else None

    def _too_few(self, targets: list[Occupant], world: ChaosView) -> str | None:
        hit = {target.member for target in targets if target.in_view} - self._gone
        left = [member for member in self._training(world) if member not in hit]
        bare = {member.coordinate for member in hit} - {member.coordinate for member in left}  # no rank is left that holds this part
        if not hit or (len(left) >= self._min_ranks and not bare):
            return None
        there = f"{len(left)} ranks" if len(left) < self._min_ranks else f"no rank at {in_words(min(bare))}"
        if not self._lose_all:
            return f"it would leave {there}{f' of at least {self._min_ranks}' if len(left) < self._min_ranks else ''}"
        return None if world.restorable else f"it would leave {there}, and neither memory nor store holds a state to go on from"

    def _training(self, world: ChaosView) -> list[Member]:
        return [o.member for o in world.slots.values() if o.in_view and o.member not in self._gone]

    def _too_wide(self, fault: Fault, members: tuple[Member, ...], nodes: tuple[int, ...], now_s: float, world: ChaosView) -> str | None:
        """The reason why the blast radius forbids it. A place counts as hit until its fault is healed, and its ranks train again."""

        def lasts(name: str, reach: FaultReach) -> bool:
            trains = {member.slot for member in self._training(world)}
            taken = any(member in self._gone and member.slot not in trains for member in reach.members)
            return taken or name in self._open or name in self._announced

        return self._radius.refusal(fault.id, _reach(fault, members, nodes, now_s), lasts)

    def _targets(self, fault: Fault, kind: FaultKind, world: ChaosView) -> list[Occupant]:
        if self._lose_all and fault.component == JOB_WIDE:
            slots: tuple[int, ...] = tuple(world.slots)
        elif kind.whole_rail and fault.slot is not None:
            slots = world.rail(fault.slot)
        elif fault.slot is not None:
            slots = self._aimed(fault.slot, world)
        else:
            index = self._node(fault.node, world)
            slots = () if index is None else world.nodes[index]
        return [world.slots[slot] for slot in slots if slot in world.slots and not self._dead(world.slots[slot].member)]

    def _aimed(self, slot: int, world: ChaosView) -> tuple[int, ...]:
        """The slot; of ranks at one coordinate alone, one of those that train."""
        if not self._at:
            return (slot,)
        there = sorted(member.slot for member in self._training(world) if set(self._at) <= set(member.coordinate))
        return (there[slot % len(there)],) if there else ()

    def _dead(self, member: Member) -> bool:
        """Whether it was struck dead, though the view may not show it yet. (A hung one trains no more, but its process still exists.)"""
        hung = {m for opened in self._open.values() if _stands_still(opened.fault) for m in opened.members}
        return member in self._gone and member not in hung

    # ---- nodes -------------------------------------------------------------------------------------------------------------------------

    def _settle(self, world: ChaosView) -> None:
        """A plan names places 0, 1, ... Nodes keep their places while they live, and a new node takes the first empty one."""
        if not world.running:
            return  # nodes may still be joining, in any order
        self._place = {place: index for place, index in self._place.items() if index in world.nodes}
        place = 0
        for index in sorted(set(world.nodes) - set(self._place.values())):
            while place in self._place:
                place += 1
            self._place[place] = index

    def _node(self, place: int | None, world: ChaosView) -> int | None:
        index = self._place.get(place) if place is not None else None
        return index if index in world.nodes else None

    # ---- heal --------------------------------------------------------------------------------------------------------------------------

    def _opened(self, fault: Fault, members: tuple[Member, ...], at_s: float, nodes: tuple[int, ...] = ()) -> None:
        kind = drawn(fault)
        if kind.takes_ranks:
            self._gone.update(members)
        if Cost.NODE in kind.may_cost:
            self._down.add(fault.id)
        self._radius.count(fault.id, _reach(fault, members, tuple(node for node in nodes if node not in ONE_OF.values()), at_s))
        length_s = self._length_s(fault, kind.heal)
        if length_s is not None:
            self._open[fault.id] = _Open(fault, members, at_s + length_s, nodes)

    def _length_s(self, fault: Fault, heal: Heal) -> float | None:
        """Time until the heal; None: never."""
        lengths = {Heal.REPAIR: self._repair_s, Heal.FOUND: max(fault.duration_s, KNOWN_S), Heal.NEVER: None}
        return lengths.get(heal, fault.duration_s)

    def _closed(self, fault: Fault) -> None:
        opened = self._open.pop(fault.id, None)
        if opened is not None:
            self._down.discard(fault.id)
        if opened is not None and _stands_still(fault):
            self._gone.difference_update(opened.members)

    def _forget(self, report: FaultRecord) -> None:
        """Forget a fault that was refused: it did not happen."""
        self._gone.difference_update(report.members)
        self._open.pop(report.fault.id, None)
        self._announced.pop(report.fault.id, None)
        self._down.discard(report.fault.id)
        self._radius.forget(report.fault.id)

    def _heal(self, opened: _Open, now_s: float, world: ChaosView, *, over: bool = False) -> FaultAction:
        fault, kind = opened.fault, drawn(opened.fault)
        self._closed(fault)
        if kind.unit is FaultPlace.NODE:
            return self._heal_node(opened, kind, now_s, over, world)
        present = {o.member: o for o in world.slots.values()}
        alive = [present[member] for member in opened.members if member in present]
        detail = "" if alive else "its process was replaced meanwhile"
        needed = kind.heal is Heal.AFTER or (kind.heal is Heal.ITSELF and now_s < opened.until_s)
        operations = _to_ranks(fault, kind, HEAL, alive, world) if needed else ()
        return FaultAction(FaultRecord(fault, "healed", opened.members, detail, at_s=now_s), operations)

    def _heal_node(self, opened: _Open, kind: FaultKind, now_s: float, over: bool, world: ChaosView) -> FaultAction:
        """Bring a lost node back, unless the run is over. When the run ends before a fault heals by itself, it is healed now."""
        left = over and kind.heal is Heal.REPAIR
        report = FaultRecord(opened.fault, "healed", opened.members, "the run ended before the node was back" if left else "", at_s=now_s)
        needed = (kind.heal in (Heal.REPAIR, Heal.AFTER) and not left) or (kind.heal is Heal.ITSELF and now_s < opened.until_s)
        return FaultAction(report, _orders(opened.fault, kind, HEAL, opened.nodes, world) if needed else ())


def _to_ranks(fault: Fault, kind: FaultKind, phase: str, targets: Iterable[Occupant], world: ChaosView) -> tuple[Operation, ...]:
    """Operations to the process of each target; where links are cut, to all hosts but its own."""
    orders = [(operation(fault, phase, process=target.process), target) for target in targets]
    if kind.performer is not Performer.LINKS:
        return tuple(order for order, _ in orders)
    return tuple(replace(order, hosts=_far_hosts(target, world), is_target=True) for order, target in orders)


def _orders(fault: Fault, kind: FaultKind, phase: str, hit: tuple[int, ...], world: ChaosView) -> tuple[Operation, ...]:
    """Operations to each node. A fault of links needs both ends. The struck nodes' own end comes last: it may hear no order after that."""
    if kind.performer is not Performer.LINKS:
        return tuple(operation(fault, phase, node=node) for node in hit)
    near = _addresses(hit, world)
    rest = [index for index in world.nodes if index not in hit and world.hosts.get(index, "") not in ("", *near)]
    beyond = _addresses((*rest, HEAD_NODE), world)
    far = [replace(operation(fault, phase, node=index), hosts=near) for index in rest]
    own = [index for index in hit if index in world.nodes and index in world.hosts]
    return (*far, *(replace(operation(fault, phase, node=index), hosts=beyond, is_target=True) for index in own))


def _addresses(nodes: Iterable[int], world: ChaosView) -> tuple[str, ...]:
    return tuple(dict.fromkeys(world.hosts[node] for node in nodes if node in world.hosts))


def _far_hosts(target: Occupant, world: ChaosView) -> tuple[str, ...]:
    """Addresses of all hosts of the run but that of ``target``."""
    node = world.node_of(target.member.slot)
    own = world.hosts.get(node, "") if node is not None else ""
    return tuple(host for host in _addresses(world.hosts, world) if host != own) if own else ()


def _no_far_host(targets: Iterable[Occupant], world: ChaosView) -> str | None:
    """The reason why a rank cannot be cut off: its node has no agent, or all nodes share one host."""
    alone = any(not _far_hosts(target, world) for target in targets)
    return "its node has no agent, or the same address as all others: links are cut between hosts" if alone else None


def _alone_at(node: int, world: ChaosView) -> str | None:
    """The reason why the links of a node cannot be cut: it has no agent, or no address of its own."""
    if node not in world.hosts:
        return f"node {node} has no agent"
    others = [index for index, host in world.hosts.items() if host == world.hosts[node] and index != node]
    where = "the head" if others == [HEAD_NODE] else f"{len(others)} others"
    return f"node {node} has the same address as {where}: links are cut between hosts" if others else None


def _reach(fault: Fault, members: tuple[Member, ...], nodes: tuple[int, ...], at_s: float) -> FaultReach:
    kind = drawn(fault)
    return FaultReach(at_s, members, nodes, kind.whole_rack or kind.whole_rail)


def _can_be_healed(fault: Fault) -> bool:
    """Whether chaos heals it: a fault that the run finds by itself stays until then."""
    return drawn(fault).heal is not Heal.FOUND


def _holds_up(fault: Fault) -> bool:
    return _stands_still(fault) or Cost.SLOW in kind_of(fault.kind).may_cost


def _stands_still(fault: Fault) -> bool:
    return any(cost in kind_of(fault.kind).may_cost for cost in (Cost.STILL, Cost.APART))


def _suppressed(fault: Fault, now_s: float, why: str) -> FaultAction:
    return FaultAction(FaultRecord(fault, "suppressed", (), why, at_s=now_s))
