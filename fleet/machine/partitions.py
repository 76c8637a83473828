"""When a node falls silent, and it cannot be told whether it is dead or only cut off: who is given up, and who is waited for.

A closed connection says that an agent is dead; silence says nothing. With ``on_partition = go-on`` who is silent for ``node_s`` is lost,
and the side that the coordinator is on trains on. With ``stall`` the run stands still until all are heard again, and goes on with the
ranks it had; after ``stall_s`` of silence a node counts as lost all the same. When no node at all is heard, it is the coordinator that is
cut off, and it waits whatever the setting: there is nobody to go on with.
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
    """Note whether the coordinator hears nobody. Once it hears somebody again, the others have time to call: not all come at once."""
    roster, liveness = machine.roster, machine.liveness
    silent, was_alone = roster.unheard(STOOD_STILL_S, now_s), liveness.alone
    liveness.alone = bool(roster.nodes) and len(silent) == len(roster.nodes)
    if liveness.alone and not was_alone:
        probe("the coordinator hears nobody")
    if was_alone and not liveness.alone:
        roster.receive_later(silent, now_s)


def hold(machine: MachineState, now_s: float) -> None:
    """At a tick: have everyone leave the view while nodes are away, once, and give them time to answer when they are back."""
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
    """Once when nodes fall silent, however many follow, and once when all are back or given up."""
    if bool(away) != bool(machine.liveness.away):
        reason = f"{_named(away)}: all wait for as long as timeouts.stall_s" if away else "nobody is waited for any more"
        machine.decide("partition", "wait" if away else "recovered", reason, Figures({"nodes": float(len(away))}), now_s)
    machine.liveness.away = away


def _named(away: frozenset[str]) -> str:
    return f"{'node' if len(away) == 1 else 'nodes'} {', '.join(sorted(away))} cannot be heard"
