"""The part of ``FleetMachine`` that changes a view beside the running steps: its members form the next one and enter it at a boundary.

A proposal takes in newcomers, or gives the same members other shards. Nobody leaves a running view by one.
"""

from __future__ import annotations

import math

from fleet.machine import departures
from fleet.machine.candidates import StateSource, grown, situation
from fleet.machine.leaving import cancel
from fleet.machine.state import MachineState
from fleet.machine.views import announce, make_view
from fleet.protocol.instructions import Propose
from fleet.protocol.types import Formation, Ranges, View


def try_grow(machine: MachineState, now_s: float) -> bool:
    """Ranks that stand by are taken in where some are missing, if the recovery policy says so.

    True when they are, or it will say so before long: a checkpoint that is begun now would only hold them up.
    """
    view = machine.view
    assert view is not None
    if len(view.members) >= departures.wanted(machine, view) or now_s < machine.no_growth_until_s:
        return False
    formation = machine.recovery.grow(situation(machine, now_s), now_s)
    if formation.decision.action != "grow":
        return formation.decision.valid_until_s < math.inf
    if machine.checkpoints.pending or not set(view.members) <= set(formation.members):
        return False
    proposal = make_view(machine, formation.members, grown(formation.members, view), machine.committed)
    propose(machine, proposal, formation, now_s)
    return True


def reshare(machine: MachineState, ranges: Ranges, formation: Formation, now_s: float) -> None:
    """The present members go on with other shards; everyone keeps its state."""
    assert machine.view is not None
    proposal = make_view(machine, machine.view.members, StateSource(0, (), machine.committed), machine.committed, ranges=ranges)
    propose(machine, proposal, formation, now_s)


def propose(machine: MachineState, proposal: View, formation: Formation, now_s: float) -> None:
    """Let its members form it beside the running steps."""
    machine.proposal = proposal
    announce(machine, proposal, formation, True, now_s)
    machine.proposed_s = now_s
    _send(machine, proposal, now_s)


def _send(machine: MachineState, proposal: View, now_s: float) -> None:
    machine.sent_s = now_s
    for member in proposal.members:
        machine.roster.sent(member, proposal.generation)
    machine.say(Propose(proposal))


def watch(machine: MachineState, now_s: float) -> None:
    """Repeat what may have been lost, and give up what nobody enters."""
    limits = machine.settings.timeouts
    assert machine.proposal is not None
    if now_s - machine.proposed_s > limits.form_s + limits.progress_s:
        cancel(machine, now_s, "it was not entered in time")
    elif now_s - machine.sent_s >= limits.resend_s:
        _send(machine, machine.proposal, now_s)
