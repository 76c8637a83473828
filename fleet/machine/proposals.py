"""The part of ``FleetMachine`` that changes a view beside the running steps: its members form the next one and enter it at a boundary.

A proposal takes in newcomers, lets members go, or gives the same members other shards. Members that it lets go agree to the boundary like
the others, and stand by behind it. With sharded state, at most as many go at a time as there are copies of each part, and none while chunks
move.
"""

from __future__ import annotations

import math

from fleet.machine import nodes
from fleet.machine.candidates import StateSource, computing, grown, room, situation, spares_inside
from fleet.machine.leaving import cancel
from fleet.machine.state import MachineState
from fleet.machine.views import announce, make_view, proposed, send
from fleet.protocol.probes import probe
from fleet.protocol.types import Formation, Ranges, View


def try_change(machine: MachineState, now_s: float) -> bool:
    """Propose a view with spares for missing ranks, or without ranks that are to leave, if the recovery policy wants it.

    True when that is proposed, or when the policy will want it soon: a checkpoint that begins now would only delay it.
    """
    view = machine.view
    assert view is not None
    size = len(view.members)
    full = size == room(machine) + spares_inside(machine) and len(view.computing) == computing(machine, size)
    whole = full and not nodes.going(machine, view)
    if whole or now_s < machine.growth.not_before_s:
        return False
    there = situation(machine, now_s)
    formation = machine.policies.recovery.grow(there, now_s)
    if not formation.members:
        return formation.decision.valid_until_s < math.inf
    if machine.checkpoints.pending or not set(view.members) <= {candidate.member for candidate in there.candidates}:
        return False
    if leaving := set(view.members) - set(formation.members):
        probe("members leave at a step boundary")
        if set(formation.members) - set(view.members):
            probe("newcomers come and members leave at one step boundary")
        if len(leaving) > 1:
            probe("several members leave at one step boundary")
    proposal = make_view(machine, formation.members, grown(formation.members, view), machine.committed)
    propose(machine, proposal, formation, now_s)
    return True


def reshare(machine: MachineState, ranges: Ranges, formation: Formation, now_s: float) -> None:
    """Propose other shards for the present members. Each member keeps its state."""
    assert machine.view is not None
    proposal = make_view(machine, machine.view.members, StateSource(0, (), machine.committed), machine.committed, ranges=ranges)
    propose(machine, proposal, formation, now_s)


def propose(machine: MachineState, proposal: View, formation: Formation, now_s: float) -> None:
    """Have the proposal's members form it beside the running steps."""
    machine.growth.proposal = proposal
    announce(machine, proposal, formation, True, now_s)
    machine.growth.proposed_s = now_s
    send(machine, proposed(machine), now_s)


def watch(machine: MachineState, now_s: float) -> None:
    """Repeat the proposal, since messages may be lost. Give it up if its members do not enter it in time."""
    limits, proposal = machine.settings.timeouts, machine.growth.proposal
    assert proposal is not None
    if now_s - machine.growth.proposed_s > limits.form_s + limits.progress_s:
        cancel(machine, now_s, "it was not entered in time")
    elif now_s - machine.assembly.sent_s >= limits.resend_s:
        send(machine, proposed(machine), now_s)
