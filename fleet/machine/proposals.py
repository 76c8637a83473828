"""The part of ``FleetMachine`` that changes a view beside the running steps: its members form the next one and enter it at a boundary.

A proposal takes in newcomers, or gives the same members other shards. Nobody leaves a running view by one.
"""

from __future__ import annotations

import math

from fleet.machine import departures
from fleet.machine.candidates import StateSource, grown, situation
from fleet.machine.leaving import cancel
from fleet.machine.state import MachineState
from fleet.machine.views import announce, make_view, send
from fleet.protocol.instructions import Propose
from fleet.protocol.types import Formation, Ranges, View


def try_grow(machine: MachineState, now_s: float) -> bool:
    """Ranks that stand by are taken in where some are missing, if the recovery policy says so.

    True when they are, or it will say so before long: a checkpoint that is begun now would only hold them up.
    """
    view = machine.view
    assert view is not None
    if len(view.members) >= departures.wanted(machine, view) or now_s < machine.growth.not_before_s:
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
    """The present members go on with other shards; everyone keeps its state."""
    assert machine.view is not None
    proposal = make_view(machine, machine.view.members, StateSource(0, (), machine.committed), machine.committed, ranges=ranges)
    propose(machine, proposal, formation, now_s)


def propose(machine: MachineState, proposal: View, formation: Formation, now_s: float) -> None:
    """Let its members form it beside the running steps."""
    machine.growth.proposal = proposal
    announce(machine, proposal, formation, True, now_s)
    machine.growth.proposed_s = now_s
    send(machine, Propose(proposal), now_s)


def watch(machine: MachineState, now_s: float) -> None:
    """Repeat what may have been lost, and give up what nobody enters."""
    limits, proposal = machine.settings.timeouts, machine.growth.proposal
    assert proposal is not None
    if now_s - machine.growth.proposed_s > limits.form_s + limits.progress_s:
        cancel(machine, now_s, "it was not entered in time")
    elif now_s - machine.assembly.sent_s >= limits.resend_s:
        send(machine, Propose(proposal), now_s)
