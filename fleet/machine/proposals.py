"""The part of ``FleetMachine`` that changes a view beside the running steps: its members form the next one and enter it at a boundary.

A proposal takes in newcomers, or gives the same members other shards. No member leaves a running view by a proposal.

For a smaller world all members leave the view together, and it forms again with fewer ranks. The others stand by from then on. No rank and
no step is lost: the shards of the present step are computed again. With sharded state, at most as many ranks go at a time as there are
copies of each part.
"""

from __future__ import annotations

import math

from fleet.machine import nodes
from fleet.machine.candidates import StateSource, chunks_move, grown, situation
from fleet.machine.leaving import cancel, gather
from fleet.machine.state import MachineState, Phase
from fleet.machine.views import announce, make_view, send
from fleet.protocol.causes import GatherWhy
from fleet.protocol.instructions import Propose
from fleet.protocol.probes import probe
from fleet.protocol.types import Formation, Ranges, View


def try_grow(machine: MachineState, now_s: float) -> bool:
    """Propose a view with spares for missing ranks, if the recovery policy wants it.

    True when that is proposed, or when the policy will want it soon: a checkpoint that begins now would only delay it.
    """
    view = machine.view
    assert view is not None
    if len(view.members) >= nodes.wanted(machine, view) or now_s < machine.growth.not_before_s:
        return False
    formation = machine.policies.recovery.grow(situation(machine, now_s), now_s)
    if formation.decision.action != "grow":
        return formation.decision.valid_until_s < math.inf
    if machine.checkpoints.pending or not set(view.members) <= set(formation.members):
        return False
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
    send(machine, Propose(proposal), now_s)


def watch(machine: MachineState, now_s: float) -> None:
    """Repeat the proposal, since messages may be lost. Give it up if its members do not enter it in time."""
    limits, proposal = machine.settings.timeouts, machine.growth.proposal
    assert proposal is not None
    if now_s - machine.growth.proposed_s > limits.form_s + limits.progress_s:
        cancel(machine, now_s, "it was not entered in time")
    elif now_s - machine.assembly.sent_s >= limits.resend_s:
        send(machine, Propose(proposal), now_s)


def shrink(machine: MachineState, view: View, now_s: float) -> None:
    """While a view runs: if it is larger than the new world, all members leave it. Not while a checkpoint is written, or chunks move."""
    if not machine.growth.resized or machine.phase != Phase.RUN or machine.checkpoints.pending:
        return
    if chunks_move(machine, view):
        probe("a smaller world waits for chunks that move")
        return
    wanted = nodes.wanted(machine, view)
    machine.growth.resized = len(view.members) > wanted
    if machine.growth.resized:
        gather(machine, now_s, GatherWhy.RESIZED, f"the world is to have {wanted} ranks, and {len(view.members)} train")
