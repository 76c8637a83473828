"""Turns a plan into operations, and every planned fault into a report of what became of it.

The conductor does no I/O and reads no clock: it looks at a frozen ``ChaosView``, says what to do as data, and is told what came of it. All
that it remembers is in the journal, so that a restarted coordinator goes on where the last one was (:meth:`Conductor.recall`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fleet.protocol.events import FaultReported
from fleet.protocol.fault_kinds import BY_HAND, HEAL, KNOWN_S, START, Cost, FaultKind, Heal, Operation, Place, drawn, kind_of, operation
from fleet.protocol.records import FaultRecord, Record
from fleet.protocol.types import Fault, Member, Process

JOB_WIDE = "software"
"""The component of the catalogue whose blast radius is the job."""

WITNESSES = 3
"""Replicas that it takes to say which one is wrong."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """The process that fills a slot now. ``in_view``: it trains; otherwise it is a spare or still starting."""

    member: Member
    process: Process
    in_view: bool


@dataclass(frozen=True, slots=True)
class ChaosView:
    """What chaos sees of the world: live slots, the slots on each live worker node (by the node's index), whether the run trains, and
    whether a copy in memory or a durable checkpoint could bring it back if all ranks were lost."""

    slots: Mapping[int, Occupant]
    nodes: Mapping[int, tuple[int, ...]]
    running: bool
    restorable: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """Perform ``operations``, then hand what came of it to :meth:`Conductor.outcome` and send the event that this returns."""

    report: FaultReported
    operations: tuple[Operation, ...] = ()


@dataclass(slots=True)
class _Open:
    """An executed fault that is to be healed."""

    fault: Fault
    members: tuple[Member, ...]
    until_s: float
    node: int | None = None


class Conductor:
    """Executes, suppresses and heals the faults of ``plan``.

    Args:
        plan: the run's faults.
        min_ranks: the run's least number of ranks; a fault that would leave fewer of those in view is suppressed.
        repair_s: a lost node comes back after that long; None: never.
        max_nodes_down: how many nodes may be lost at a time; more would have no room to be replaced in.
        lose_all: all ranks may be lost, when there is something to go on from; a fault of software then takes them all.
        sharded: the optimizer's state is spread over the ranks. What is wrong in one of them then ends the run, so no bit of it is flipped.
    """

    def __init__(
        self, plan: Iterable[Fault], *, min_ranks: int = 1, repair_s: float | None = None, max_nodes_down: int = 1, lose_all: bool = False,
        sharded: bool = False,
    ) -> None:  # fmt: skip
        self._ahead = sorted(plan, key=lambda fault: (fault.at_s, fault.id), reverse=True)
        self._min_ranks, self._repair_s, self._max_nodes_down, self._lose_all = min_ranks, repair_s, max_nodes_down, lose_all
        self._sharded = sharded
        self._open: dict[str, _Open] = {}
        self._gone: set[Member] = set()
        self._down = 0
        self._place: dict[int, int] = {}
        self._paused = False

    def planned(self, now_s: float) -> list[FaultReported]:
        """One report for each fault still ahead: send them once, before the first is due."""
        return [FaultReported(fault, "planned", now_s, ()) for fault in reversed(self._ahead)]

    def add(self, faults: Iterable[Fault], now_s: float) -> list[FaultReported]:
        """Plan more faults; one report for each."""
        more = list(faults)
        self._ahead = sorted([*self._ahead, *more], key=lambda fault: (fault.at_s, fault.id), reverse=True)
        return [FaultReported(fault, "planned", now_s, ()) for fault in more]

    def pause(self, paused: bool) -> None:
        """While paused, faults that are due are suppressed, but for those that are addressed by hand."""
        self._paused = paused

    def next_s(self) -> float:
        """When there is something to do next; infinity when nothing is left."""
        times = [opened.until_s for opened in self._open.values()]
        if self._ahead:
            times.append(self._ahead[-1].at_s)
        return min(times, default=float("inf"))

    def due(self, now_s: float, world: ChaosView) -> list[Action]:
        """What is due at ``now_s``, heals first. Each action's outcome must be given back before the next call."""
        self._settle(world)
        actions = [self._heal(opened, now_s, world) for opened in list(self._open.values()) if opened.until_s <= now_s]
        while self._ahead and self._ahead[-1].at_s <= now_s:
            actions.append(self._strike(self._ahead.pop(), now_s, world))
        return actions

    def end(self, now_s: float, world: ChaosView) -> list[Action]:
        """The run is over: let every stopped process go on, and report what was never executed."""
        self._settle(world)
        actions = [self._heal(opened, now_s, world, over=True) for opened in list(self._open.values())]
        while self._ahead:
            actions.append(_suppressed(self._ahead.pop(), now_s, "the run ended before it was due"))
        return actions

    def outcome(self, action: Action, refusals: Iterable[str | None], now_s: float) -> FaultReported:
        """The event to send, once ``action`` was performed: an executed fault that was refused throughout becomes a suppressed one.

        ``refusals`` has one answer for each operation: why it was refused, or None.
        """
        report, answers = replace(action.report, at_s=now_s), list(refusals)
        refused = [why for why in answers if why is not None]
        if not refused:
            return report
        detail = "; ".join(refused)
        if report.phase == "executed" and len(refused) == len(answers):
            self._forget(report)
            return replace(report, phase="suppressed", detail=f"refused: {detail}")
        return replace(report, detail=f"{report.detail}; in part refused: {detail}".lstrip("; "))

    def recall(self, records: Iterable[Record], origin_s: float = 0.0) -> None:
        """Take up where an earlier conductor of the same plan stopped, from the run's journal.

        ``origin_s`` is when the plan's time began on the journal's clock. The last word on each fault counts; one of
        which it is not known whether it was carried out is healed in its time.
        """
        last = {record.fault.id: record for record in records if isinstance(record, FaultRecord) and record.phase != "planned"}
        for record in last.values():
            if record.phase not in ("suppressed", "healed"):
                self._opened(record.fault, record.members, record.at_s - origin_s)
        self._ahead = [fault for fault in self._ahead if fault.id not in last]

    # ---- strike ------------------------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault, now_s: float, world: ChaosView) -> Action:
        kind = drawn(fault)
        why = self._common_refusal(fault, kind, world)
        if why is None and kind.unit is Place.NODE:
            return self._strike_node(fault, kind, now_s, world)
        targets = self._targets(fault, world)
        why = why or self._rank_refusal(fault, kind, targets, world)
        if why is not None:
            return _suppressed(fault, now_s, why)
        members = tuple(target.member for target in targets)
        self._opened(fault, members, now_s)
        return Action(FaultReported(fault, "executed", now_s, members), tuple(operation(fault, START, process=t.process) for t in targets))

    def _common_refusal(self, fault: Fault, kind: FaultKind, world: ChaosView) -> str | None:
        if kind.performer is None:
            return f"{fault.kind} has no operation yet: {kind.why_not}"
        if self._paused and fault.component != BY_HAND:
            return "chaos was stopped by an operator"
        return None if world.running else "the run does not train yet"

    def _rank_refusal(self, fault: Fault, kind: FaultKind, targets: list[Occupant], world: ChaosView) -> str | None:
        where = f"slot {fault.slot}" if fault.slot is not None else f"node {fault.node}"
        if not targets:
            return f"{where} has no live process"
        held = {member for opened in self._open.values() for member in opened.members if kind_of(opened.fault.kind).lasts}
        if Cost.DEATH not in kind.may_cost and any(target.member in held for target in targets):
            return f"{where} is already stopped or slowed"
        wrong = Cost.WRONG in kind.may_cost
        if wrong and self._sharded:
            return "optimizer state is sharded: a majority could not say which rank is wrong, and the run would end"
        if wrong and sum(o.in_view and o.member not in self._gone for o in world.slots.values()) < WITNESSES:
            return f"fewer than {WITNESSES} ranks train: there would be no majority to say which one is wrong"
        return self._too_few(targets, world) if kind.takes_ranks else None

    def _strike_node(self, fault: Fault, kind: FaultKind, now_s: float, world: ChaosView) -> Action:
        index = self._node(fault.node, world)
        if index is None:
            return _suppressed(fault, now_s, f"node {fault.node} is not there")
        targets = [world.slots[slot] for slot in world.nodes[index] if slot in world.slots]
        why = self._no_room(world) if Cost.NODE in kind.may_cost else None
        why = why or (self._too_few(targets, world) if kind.takes_ranks else None)
        if why is not None:
            return _suppressed(fault, now_s, why)
        members = tuple(target.member for target in targets)
        self._opened(fault, members, now_s, index)
        return Action(FaultReported(fault, "executed", now_s, members), (operation(fault, START, node=index),))

    def _no_room(self, world: ChaosView) -> str | None:
        if self._down >= self._max_nodes_down:
            return f"{self._down} lost node is not back yet: there is no room for the ranks of another"
        return "it is the last node" if len(world.nodes) <= 1 else None

    def _too_few(self, targets: list[Occupant], world: ChaosView) -> str | None:
        hit = {target.member for target in targets if target.in_view} - self._gone
        left = sum(o.in_view and o.member not in self._gone and o.member not in hit for o in world.slots.values())
        if not hit or left >= self._min_ranks:
            return None
        if not self._lose_all:
            return f"it would leave {left} ranks of at least {self._min_ranks}"
        return None if world.restorable else f"it would leave {left} ranks, and neither memory nor store holds a state to go on from"

    def _targets(self, fault: Fault, world: ChaosView) -> list[Occupant]:
        if self._lose_all and fault.component == JOB_WIDE:
            slots: tuple[int, ...] = tuple(world.slots)
        elif fault.slot is not None:
            slots = (fault.slot,)
        else:
            index = self._node(fault.node, world)
            slots = () if index is None else world.nodes[index]
        return [world.slots[slot] for slot in slots if slot in world.slots and not self._dead(world.slots[slot].member)]

    def _dead(self, member: Member) -> bool:
        """Struck dead already, though the view may not show it yet. (A hung one is gone from training, but its process is there.)"""
        hung = {m for opened in self._open.values() if _stands_still(opened.fault) for m in opened.members}
        return member in self._gone and member not in hung

    # ---- nodes -------------------------------------------------------------------------------------------------------------------------

    def _settle(self, world: ChaosView) -> None:
        """A plan names places 0, 1, ...; nodes keep theirs while they live, and a new node takes the first that is empty."""
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

    def _opened(self, fault: Fault, members: tuple[Member, ...], at_s: float, node: int | None = None) -> None:
        kind = drawn(fault)
        if kind.takes_ranks:
            self._gone.update(members)
        self._down += Cost.NODE in kind.may_cost
        length_s = self._length_s(fault, kind.heal)
        if length_s is not None:
            self._open[fault.id] = _Open(fault, members, at_s + length_s, node)

    def _length_s(self, fault: Fault, heal: Heal) -> float | None:
        """After that long it is healed; None: never."""
        lengths = {Heal.REPAIR: self._repair_s, Heal.FOUND: max(fault.duration_s, KNOWN_S), Heal.NEVER: None}
        return lengths.get(heal, fault.duration_s)

    def _closed(self, fault: Fault) -> None:
        opened = self._open.pop(fault.id, None)
        if opened is not None:
            self._down -= Cost.NODE in kind_of(fault.kind).may_cost
        if opened is not None and _stands_still(fault):
            self._gone.difference_update(opened.members)

    def _forget(self, report: FaultReported) -> None:
        """The world refused the fault: it did not happen."""
        self._gone.difference_update(report.members)
        self._open.pop(report.fault.id, None)
        self._down -= Cost.NODE in kind_of(report.fault.kind).may_cost

    def _heal(self, opened: _Open, now_s: float, world: ChaosView, *, over: bool = False) -> Action:
        fault, kind = opened.fault, drawn(opened.fault)
        self._closed(fault)
        if kind.unit is Place.NODE:
            return self._heal_node(opened, kind, now_s, over)
        present = {o.member: o.process for o in world.slots.values()}
        alive = [present[member] for member in opened.members if member in present]
        detail = "" if alive else "its process was replaced meanwhile"
        needed = kind.heal is Heal.AFTER or (kind.heal is Heal.ITSELF and now_s < opened.until_s)
        operations = tuple(operation(fault, HEAL, process=process) for process in alive) if needed else ()
        return Action(FaultReported(fault, "healed", now_s, opened.members, detail), operations)

    def _heal_node(self, opened: _Open, kind: FaultKind, now_s: float, over: bool) -> Action:
        """A node that is lost comes back, unless the run is over."""
        left = over and kind.heal is Heal.REPAIR
        report = FaultReported(opened.fault, "healed", now_s, opened.members, "the run ended before the node was back" if left else "")
        needed = kind.heal in (Heal.REPAIR, Heal.AFTER) and not left
        return Action(report, (operation(opened.fault, HEAL, node=opened.node),) if needed else ())


def _stands_still(fault: Fault) -> bool:
    return Cost.STILL in kind_of(fault.kind).may_cost


def _suppressed(fault: Fault, now_s: float, why: str) -> Action:
    return Action(FaultReported(fault, "suppressed", now_s, (), why))


def conduct(
    conductor: Conductor, actions: Iterable[Action], now_s: float, operate: Callable[[Operation], str | None]
) -> list[FaultReported]:
    """Perform ``actions`` one after the other; the events to send. ``operate`` does one operation, and says why not, if not.

    For worlds whose time stands still meanwhile.
    """
    return [conductor.outcome(action, [operate(order) for order in action.operations], now_s) for action in actions]
