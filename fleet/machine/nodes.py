"""Nodes that come up, and those whose ranks stay out of every view: repeat offenders, and those that failed their pre-flight check."""

from __future__ import annotations

from fleet.machine.state import MachineState
from fleet.protocol.decisions import Decision, KeptOut, figures
from fleet.protocol.events import NodeJoined


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
    payload = KeptOut(float(event.index), figures(decision.payload))
    machine.decide(policy, "keep_out", f"node {event.index} ({event.node}): {decision.reason}", payload, now_s)
