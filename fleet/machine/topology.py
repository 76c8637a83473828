"""Reports of ``FleetMachine`` on failure domains: unmet requirements of a new view's placement, and domains that have lost all nodes."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.machine.state import MachineState
from fleet.protocol import topology
from fleet.protocol.decisions import DomainLost, Lacking, PlacementAction
from fleet.protocol.domains import place_of
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade
from fleet.protocol.topology import Gone, asked
from fleet.protocol.types import Member, View


def report_lacking(machine: MachineState, view: View, now_s: float) -> None:
    """Journal the requirements that the placement of ``view`` does not meet, if they differ from those of the last view."""
    settings = machine.settings
    if not asked(settings.domains) and settings.replica_size == 1:
        return
    paths = machine.checkpoints.domains | machine.roster.domains
    memories = {memory.address: place_of(memory.domain) for memory in machine.checkpoints.memories.values()}
    homes = [machine.roster.by_slot[member.slot].process.node for member in view.members]
    ranks = [place_of(paths.get(node, "")) for node in homes]
    copies = [[memories.get(address, ()) for address in kept] for kept in view.copies] if asked(settings.domains) else []
    found = topology.lacking(ranks, copies, settings.replica_size, settings.domains)
    if found != machine.assembly.lacking:
        machine.assembly.lacking = found
        action: PlacementAction = "loosen" if found != Lacking() else "meet"
        machine.write(DecisionMade("placement", action, topology.in_words(found), found, now_s))


def node_gone(machine: MachineState, node: str, path: str, now_s: float) -> None:
    """A node is lost. If a domain has lost all its nodes with it within a short time, journal that as one loss.

    Where ranks compute shards together, a node has whole groups: its ranks are one loss, too.
    """
    levels, gone = machine.settings.domains, machine.roster.lost_nodes
    for name in [name for name, each in gone.items() if each.at_s < now_s - topology.WINDOW_S]:
        del gone[name]
    nodes: tuple[str, ...] = ()
    if path and asked(levels):
        gone[node] = Gone(place_of(path), now_s)
        domain, nodes = topology.lost_domain(node, gone, map(place_of, machine.roster.domains.values()))
    if nodes:
        probe("all nodes of a domain are lost")
        level, name = topology.named(domain, levels, len(gone[node].place))
        _one_loss(machine, (level, name), nodes, machine.losses.of_nodes(nodes, now_s - topology.WINDOW_S), now_s)
    elif machine.settings.group > 1 and len(losses := machine.losses.of_nodes((node,), now_s)) > 1:
        probe("a node is lost with ranks that compute together")
        _one_loss(machine, ("node", node), (node,), losses, now_s)


def _one_loss(
    machine: MachineState, domain: tuple[str, str], nodes: tuple[str, ...], losses: Sequence[tuple[Member, bool]], now_s: float
) -> None:  # fmt: skip
    """Journal these losses as one. ``domain``: (its level, its name)."""
    if not losses:
        return
    lost = DomainLost(*domain, nodes, tuple((each.slot, each.incarnation) for each, _ in losses), sum(joined for _, joined in losses))
    membership = f"{lost.in_view} of them in the view" if lost.in_view != len(losses) else "all of them in the view"
    count = f"{len(nodes)} nodes with " if len(nodes) > 1 else ""
    words = f"{' '.join(domain)} is lost: {count}{len(losses)} ranks, {membership}"
    machine.write(DecisionMade("domains", "lost", words, lost, now_s))
