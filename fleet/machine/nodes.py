"""Nodes that come up, nodes that stay out of every view, and nodes that will be taken away after a notice.

Repeat offenders stay out, and nodes that failed their pre-flight check. A cloud, maintenance or an operator announces that a node will go.
Its ranks train on, and spares join beside them, at a step boundary, until the world is whole without them. Then all ranks leave the view
together, and it forms again without the ranks that go, once no chunk of a sharded state moves. No rank and no step is lost: the other ranks
compute the shards of the present step again. Without spares, the ranks leave right before the node goes, and the world shrinks.
"""

from __future__ import annotations

from fleet.machine.candidates import chunks_move, room
from fleet.machine.leaving import gather
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Decision, Figures, Notice
from fleet.protocol.events import NodeJoined, NodeLeaves, NodeStays
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade
from fleet.protocol.types import View


def joined(machine: MachineState, event: NodeJoined, now_s: float) -> None:
    """The agent of a node is there. The journal has one decision with the reason to keep a node out. Its ranks wait beside the run."""
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
"""Seconds, and one step more, before a node goes: then its ranks leave the view, with or without spares for them."""
POLICY = "maintenance"


def announced(machine: MachineState, event: NodeLeaves, now_s: float) -> None:
    """A node goes at ``until_s``. A repeated notice changes nothing. A notice with another time replaces the last one."""
    roster = machine.roster
    if event.node not in roster.nodes or roster.leaving.get(event.node) == event.until_s:
        return
    roster.leaving[event.node] = event.until_s
    reason = f"node {event.node} goes in {max(0.0, event.until_s - now_s):.0f} s: {event.why}"
    machine.write(DecisionMade(POLICY, "leave", reason, Notice(event.node, event.until_s), now_s))


def withdrawn(machine: MachineState, event: NodeStays, now_s: float) -> None:
    """A node does not go after all. Its ranks are like all others again."""
    if event.node in machine.roster.released:
        probe("a notice is withdrawn after the ranks have left")
    if machine.roster.unannounce(event.node):
        machine.write(DecisionMade(POLICY, "stay", f"node {event.node} stays after all", Notice(event.node), now_s))


def replay(machine: MachineState, notice: Notice) -> None:
    """Take in a notice of the journal."""
    if notice.until_s is None:
        machine.roster.unannounce(notice.node)
    else:
        machine.roster.leaving[notice.node] = notice.until_s
    if notice.released:
        machine.roster.released.add(notice.node)


def wanted(machine: MachineState, view: View) -> int:
    """The wanted size of the view: the world, and the ranks that are about to leave. Each rank has at least one shard."""
    return room(machine, len(_leaving_slots(machine, view)))


def tick(machine: MachineState, view: View, now_s: float) -> None:
    """While a view runs: let ranks go once others stand in for them, or once their time is up."""
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
    if late or (left >= machine.settings.world and not machine.checkpoints.pending and not chunks_move(machine, view)):
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
