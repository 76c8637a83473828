"""Nodes that come up, some of which stay out of every view, and those that are about to be taken away, and were announced before.

Kept out are repeat offenders, and nodes that failed their pre-flight check. One that a cloud, maintenance or an operator takes away is
announced. Its ranks train on. Others are taken in beside them, at a step boundary, until the world is whole without them; then all leave
the view together, and it forms again without those that go. No step is lost, as nobody is: what they had computed of the step at hand is
computed again by the others. Without anybody to stand in, they leave right before the node goes, and the world shrinks.
"""

from __future__ import annotations

from fleet.machine.candidates import room
from fleet.machine.leaving import gather
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Decision, Figures, Notice
from fleet.protocol.events import NodeJoined, NodeLeaves, NodeStays
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade
from fleet.protocol.types import View


def joined(machine: MachineState, event: NodeJoined, now_s: float) -> None:
    """Its agent is there. One that is kept out is told once, with the reason; its ranks wait beside the run."""
    roster = machine.roster
    roster.back(event.node, now_s)
    roster.lost_nodes.pop(event.node, None)
    if event.domain:
        roster.domains[event.node] = event.domain
    if event.node in roster.kept_out:
        return
    lemon = machine.roster.lemons.get(event.index)
    if event.unfit:
        _keep_out(machine, event, "preflight", Decision("keep_out", event.unfit), now_s)
    elif lemon is not None:
        _keep_out(machine, event, "lemons", lemon, now_s)


def _keep_out(machine: MachineState, event: NodeJoined, policy: str, decision: Decision, now_s: float) -> None:
    machine.roster.kept_out.add(event.node)
    payload = Figures({**decision.fields, "node": float(event.index)})
    machine.decide(policy, "keep_out", f"node {event.index} ({event.node}): {decision.reason}", payload, now_s)


MARGIN_S = 2.0
"""So long before a node goes, and a step more, its ranks leave the view, whether or not others stand in."""
POLICY = "maintenance"


def announced(machine: MachineState, event: NodeLeaves, now_s: float) -> None:
    """A node goes at ``until_s``. The same word again says nothing; another time counts from now on."""
    roster = machine.roster
    if event.node not in roster.nodes or roster.leaving.get(event.node) == event.until_s:
        return
    roster.leaving[event.node] = event.until_s
    reason = f"node {event.node} goes in {max(0.0, event.until_s - now_s):.0f} s: {event.why}"
    machine.write(DecisionMade(POLICY, "leave", reason, Notice(event.node, event.until_s), now_s))


def withdrawn(machine: MachineState, event: NodeStays, now_s: float) -> None:
    """A node does not go after all: its ranks are as all others are."""
    if event.node in machine.roster.released:
        probe("a notice is withdrawn after the ranks have left")
    if machine.roster.unannounce(event.node):
        machine.write(DecisionMade(POLICY, "stay", f"node {event.node} stays after all", Notice(event.node), now_s))


def replay(machine: MachineState, notice: Notice) -> None:
    """What the journal says of it."""
    if notice.until_s is None:
        machine.roster.unannounce(notice.node)
    else:
        machine.roster.leaving[notice.node] = notice.until_s
    if notice.released:
        machine.roster.released.add(notice.node)


def wanted(machine: MachineState, view: View) -> int:
    """How many ranks the view shall have: the world, and those that are about to leave it. Each has a shard at least."""
    return room(machine, len(_leaving_slots(machine, view)))


def tick(machine: MachineState, view: View, now_s: float) -> None:
    """While a view runs: let go whom others stand in for, and whose time is up."""
    if not machine.roster.leaving or machine.phase != Phase.RUN or machine.growth.proposal is not None:
        return
    going = _leaving_slots(machine, view)
    left = len(view.members) - len(going)
    if not going or left < machine.settings.min_ranks:
        if going:
            probe("a node goes whose ranks cannot be spared")
        return
    margin_s = MARGIN_S + max(machine.stragglers.steps_s, default=0.0)
    late = min(machine.roster.leaving[node] for node in going.values()) - now_s <= margin_s
    if late and left < machine.settings.world:
        probe("the time of a node is up before others stand in")
    if late or (left >= machine.settings.world and not machine.checkpoints.pending):
        _release(machine, sorted(set(going.values())), left, now_s)


def _leaving_slots(machine: MachineState, view: View) -> dict[int, str]:
    """Slots of the view whose nodes are about to go, and the nodes."""
    leaving = machine.roster.leaving
    homes = {member.slot: machine.roster.by_slot[member.slot].process.node for member in view.members if machine.current(member)}
    return {slot: node for slot, node in homes.items() if node in leaving}


def _release(machine: MachineState, nodes: list[str], left: int, now_s: float) -> None:
    for node in nodes:
        machine.roster.released.add(node)
        reason = f"the ranks of node {node} leave: {left} others go on"
        machine.write(DecisionMade(POLICY, "released", reason, Notice(node, machine.roster.leaving[node], True), now_s))
    gather(machine, now_s, GatherWhy.MAINTENANCE, f"{', '.join(nodes)} will be taken away", in_person=False)
