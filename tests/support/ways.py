"""Faults for the docs: their kinds; and how they are carried out: by whom, with what, what is left when those are killed, and what it is
no test of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.protocol.fault_kinds import TABLE, FaultKind, Performer


@dataclass(frozen=True, slots=True)
class PerformerWay:
    """How one performer works, in sentences."""

    how: str
    needs: str
    killed: str
    not_for: str


WAYS: Mapping[Performer, PerformerWay] = {
    Performer.AGENT: PerformerWay(
        "Signals to the process by pidfd, so that a PID that another has since is never hit.",
        "nothing",
        "Ranks end with their agent: none stays stopped.",
        "faults of the kernel or of hardware: a stopped process keeps its memory and its connections",
    ),
    Performer.PROCESS: PerformerWay(
        "The rank does it to itself, between two shards.",
        "nothing",
        "It ends with the rank.",
        "a check of ECC or of the GPU: bits flip in what the rank holds, as a program sees it",
    ),
    Performer.HOST: PerformerWay(
        "A child of the agent does it a moment later, as the agent itself may be the target.",
        "nothing",
        "The child lets a stopped process go on, and ends, as soon as the agent is gone. A child that is killed leaves it stopped: "
        "`kill -CONT PID`.",
        "a host on which others work: all cores are busy for them, too, and nothing of theirs starts while Ray's daemon is stopped",
    ),
    Performer.CONFINED: PerformerWay(
        "A child of the agent moves the process into a memory group without memory; then the process takes some.",
        "root on the node, and cgroups (version 1, or 2 where groups below the process's may have the memory controller)",
        "The child moves who lives back, and removes the group. One that is left when it is killed, too, is empty, and the next agent on "
        "the host removes it.",
        "pressure that slows before it kills: the kernel kills at once",
    ),
    Performer.COORDINATOR: PerformerWay(
        "A child of the coordinator does it a moment later.",
        "nothing; `stop_gcs` and `kill_gcs` need the coordinator beside the cluster's control store, which it is on a cluster with one "
        "head; `kill_gcs` a cluster that Fleet has started, `disk_slow` root and cgroup version 1",
        "as above",
        "a cluster whose other jobs must not wait: `stop_gcs` stops starts for everybody",
    ),
    Performer.LINKS: PerformerWay(
        "Rules of the kernel's packet filter, in a table that a child of the agent owns; what is to be late goes through a TUN device, in "
        "which another child holds it back. Where the store refuses credentials, or connections to it are torn, a rule leads them to a "
        "child that answers, or passes on what it is sent and ends it at a byte that is drawn.",
        "root on the nodes, `nft` (Debian: `nftables`) and `ip`; nodes with IPv4 addresses of their own, or a store with one",
        "The kernel removes the table and the device with their owner. A routing rule may stay when both agent and child are killed: it "
        "leads nowhere, and the next agent on the host removes it.",
        "Ray itself: its daemons still talk to each other. Nor can anybody but the store answer where TLS is spoken: `store_denies` closes "
        "such connections, and says so. Nor for the loss of single packets of a burst: what the kernel sends as one is "
        "lost as one",
    ),
    Performer.LAUNCHER: PerformerWay(
        "SIGKILL to all processes of the run on the node; of a local cluster's node, to Ray's daemon, too.",
        "nothing",
        "What was lost is not brought back.",
        "the loss of a machine that is the store's, or the head's",
    ),
}


def ways_table() -> str:
    """One row a performer, with the kinds that it carries out."""
    heads = ("by", "kinds", "how", "needs", "when it is killed in the middle", "not for")
    rows = [_cells(performer, way) for performer, way in WAYS.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *rows)) + "\n"


def _cells(performer: Performer, way: PerformerWay) -> tuple[str, ...]:
    kinds = ", ".join(f"`{kind.name}`" for kind in TABLE if _is_by(kind, performer))
    return str(performer), kinds, way.how, way.needs, way.killed, way.not_for


def _is_by(kind: FaultKind, performer: Performer) -> bool:
    return kind.performer is performer


def kinds_table() -> str:
    """The kinds, as a table for the docs."""
    heads = ("kind", "what it is", "strikes", "may cost", "who feels it", "ends", "stands for", "survived when")
    rows = [_kind_cells(kind) for kind in TABLE]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ("---",) * len(heads), *rows)) + "\n"


def _kind_cells(kind: FaultKind) -> tuple[str, ...]:
    ends = str(kind.heal) if kind.performer is not None else f"no operation yet: {kind.why_not}"
    survived = f"`{kind.survived}`" if kind.survived is not None else ""
    places = " or ".join(kind.targets)
    costs, components = "; ".join(kind.may_cost), ", ".join(f"`{name}`" for name in kind.components)
    return f"`{kind.name}`", kind.sentence, places, costs, kind.blast_radius, ends, components, survived
