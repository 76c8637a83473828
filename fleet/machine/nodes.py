"""Nodes that come up, nodes that stay out of every view, and nodes that will be taken away after a notice.

Repeat offenders stay out, and nodes that failed their pre-flight check. A cloud, maintenance or an operator announces that a node will go.
Its ranks train on until spares stand by. Then these come and those leave at one step boundary, see ``proposals.py``: no step is lost.
Without spares, the ranks leave right before the node goes, and the world shrinks. Ranks that come to no boundary in time are called out of
the view.
"""

from __future__ import annotations

from collections.abc import Collection

from fleet.machine.candidates import MARGIN_S
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


def going(machine: MachineState, view: View) -> frozenset[str]:
    """The nodes of the view that are about to go."""
    leaving, ranks = machine.roster.leaving, map(machine.current, view.members if machine.roster.leaving else ())
    return frozenset(rank.process.node for rank in ranks if rank is not None and rank.process.node in leaving)


def left(machine: MachineState, before: View | None, view: View, now_s: float) -> None:
    """The ranks have entered ``view``: nodes that are about to go may have no rank in it any more."""
    gone = going(machine, before) - going(machine, view) if before is not None else ()
    _release(machine, gone, len(view.members), now_s)


def tick(machine: MachineState, view: View, now_s: float) -> None:
    """While a view runs: call ranks out of it whose nodes go at any moment, if there are enough others."""
    leaving = machine.roster.leaving
    late = {node for node in going(machine, view) if leaving[node] - now_s <= MARGIN_S} if leaving and machine.phase == Phase.RUN else set()
    if not late:
        return
    stay = [rank for rank in map(machine.current, view.members) if rank is not None and rank.process.node not in late]
    if len(stay) < machine.settings.min_ranks:
        probe("a node goes whose ranks cannot be spared")
        return
    probe("the time of a node is up before its ranks have left")
    _release(machine, late, len(stay), now_s)
    gather(machine, now_s, GatherWhy.MAINTENANCE, f"{', '.join(sorted(late))} will be taken away", in_person=False)


def _release(machine: MachineState, nodes: Collection[str], others: int, now_s: float) -> None:
    for node in sorted(nodes):
        machine.roster.released.add(node)
        reason = f"the ranks of node {node} leave: {others} others go on"
        machine.write(DecisionMade(POLICY, "released", reason, Notice(node, machine.roster.leaving[node], True), now_s))
