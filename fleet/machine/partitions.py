"""A node is silent, and may be dead or only cut off: the machine gives it up, or waits for it.

A closed connection means that an agent is dead; silence may mean a cut. With ``on_partition = go-on`` a node that is silent for ``node_s``
is lost, and the coordinator's side trains on. With ``stall`` the run stands still until all nodes are heard again, and goes on with the
same ranks. After ``stall_s`` of silence a node counts as lost there, too. If the coordinator hears no node at all, it is itself cut off.
Then it waits under any setting, since it has no ranks to go on with.
"""

from __future__ import annotations

from fleet.machine.leaving import gather
from fleet.machine.roster import STOOD_STILL_S
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Figures
from fleet.protocol.probes import probe


def waits(machine: MachineState) -> bool:
    """Whether the run waits for nodes that are silent."""
    return machine.liveness.alone or machine.settings.on_partition == "stall"


def look_around(machine: MachineState, now_s: float) -> None:
    """Note whether the coordinator hears no node. Once it hears a node again, the others have time to connect, since they come later."""
    roster, liveness = machine.roster, machine.liveness
    silent, was_alone = roster.unheard(STOOD_STILL_S, now_s), liveness.alone
    liveness.alone = bool(roster.nodes) and len(silent) == len(roster.nodes)
    if liveness.alone and not was_alone:
        probe("the coordinator hears no node")
    if was_alone and not liveness.alone:
        roster.receive_later(silent, now_s)


def hold(machine: MachineState, now_s: float) -> None:
    """At a tick: call all members out of the view, once, while nodes are away, and give ranks time to answer after that."""
    if machine.ending.record is not None:
        return
    roster, node_s = machine.roster, machine.settings.timeouts.node_s
    away = roster.unheard(node_s, now_s) & roster.with_ranks() if waits(machine) else frozenset()
    _report(machine, away, now_s)
    if not away:
        return
    if machine.phase in (Phase.RUN, Phase.FORM):
        gather(machine, now_s, GatherWhy.PARTITION, f"{_named(away)}: all wait", in_person=False)
    machine.assembly.deadline_s = now_s + machine.settings.timeouts.quiesce_s


def _report(machine: MachineState, away: frozenset[str], now_s: float) -> None:
    """Journal it once when the first node falls silent, and once when all are back or given up."""
    if bool(away) != bool(machine.liveness.away):
        reason = f"{_named(away)}: all wait for as long as timeouts.stall_s" if away else "the run waits for no node any more"
        machine.decide("partition", "wait" if away else "recovered", reason, Figures({"nodes": float(len(away))}), now_s)
    machine.liveness.away = away


def _named(away: frozenset[str]) -> str:
    return f"{'node' if len(away) == 1 else 'nodes'} {', '.join(sorted(away))} cannot be heard"
