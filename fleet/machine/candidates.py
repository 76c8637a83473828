"""How ``FleetMachine`` makes a view: the candidates, and the rank that gives its state to the others. No function here has an effect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fleet.machine.roster import Rank, RankPhase
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import Engaged
from fleet.protocol.probes import probe
from fleet.protocol.types import Candidate, Member, Situation, StateId, View, columns


@dataclass(frozen=True, slots=True)
class StateSource:
    """The source of a view's state: index of the donor, indices of the receivers. ``state`` None: a new history begins."""

    donor: int
    receivers: tuple[int, ...]
    state: StateId | None


def situation(machine: MachineState, now_s: float) -> Situation:
    """The recovery policy's input. Candidates have built their model, and have reported since the coordinator started: they have a store.

    Ranks of a shunned node are candidates only when there are too few others, or when they hold a state. Ranks of a node that will be taken
    away are candidates while they are in the view; see ``nodes.py``. A state that was rolled back counts as dirty when there is no
    checkpoint: its rank cannot go on before a fresh process is there.
    """
    joined = frozenset(machine.view.members) if machine.view else frozenset()
    built = [rank for rank in machine.roster.in_order() if rank.phase != RankPhase.STARTING and rank.store]
    there = [rank for rank in built if rank.process.node not in machine.roster.kept_out]
    staying = [rank for rank in there if machine.roster.stays(rank.process.node, rank.member in joined)]
    admitted = [rank for rank in staying if rank.state is not None or machine.stragglers.admits(rank.process.node, now_s)]
    chosen = next((some for some in (admitted, staying) if _in_whole_groups(machine, some) >= machine.settings.min_ranks), there)
    if len(chosen) > len(staying):
        probe("ranks that were let go are needed after all")
    leaving = machine.roster.leaving
    floor = machine.doubts.floor(StateId(0, 0)) if machine.checkpoints.newest_id is None else StateId(0, 0)
    domains = machine.checkpoints.domains | machine.roster.domains
    ranks = {member: rank for rank, member in enumerate(machine.view.members)} if machine.view else {}
    useless = is_incomplete(machine, chosen)
    candidates = tuple(
        Candidate(
            rank.member, rank.process.node, rank.state, useless or rank.dirty or (rank.state or floor) < floor, rank.member in joined,
            domains.get(rank.process.node, ""), ranks.get(rank.member, -1),
            max(0.0, leaving[rank.process.node] - now_s) if rank.process.node in leaving else math.inf,
            keeps=rank.member not in machine.roster.apart,
        )
        for rank in chosen
    )  # fmt: skip
    starting, settings = len(machine.roster.by_slot) - len(built), machine.settings
    copies = settings.optimizer_copies * settings.group  # of each column so many ranks may go: those that stay have copies of their parts
    least, spares = len(joined) - copies if settings.spread else 0, spares_inside(machine)
    if least > room(machine) + spares:
        probe("a smaller world is reached in several views")
    moves = machine.view is not None and chunks_move(machine, machine.view)
    return Situation(
        candidates, room(machine), settings.min_ranks, _since_s(machine, chosen), starting, machine.checkpoints.newest_id,
        replicated=not settings.spread, replica_size=settings.replica_size, coordinates=settings.coordinates,
        may_leave=(0 if moves else copies) if settings.spread else math.inf,
        most=settings.shards * settings.group, margin_s=margin_s(machine), spares=max(spares, least - room(machine)),
        computing=len(machine.view.computing) if machine.view is not None else 0, compute=computing(machine, len(joined)),
    )  # fmt: skip


MARGIN_S = 2.0
"""Seconds before a node goes. Its ranks are called out of the view then, if they have not left at a step boundary."""


def margin_s(machine: MachineState) -> float:
    """Seconds before a node goes in which its ranks leave at a step boundary, with or without others in their place: a group forms."""
    return 2 * MARGIN_S + 3 * max(machine.stragglers.steps_s, default=0.0)


def chunks_move(machine: MachineState, view: View) -> bool:
    """Whether chunks of a sharded state are still on their way to members of the running ``view``. The others may hold the only copy."""
    ranks = [machine.current(member) for member in view.members] if machine.settings.spread else []
    return any(rank is not None and rank.placed_in != view.generation for rank in ranks)


def _since_s(machine: MachineState, ranks: Sequence[Rank]) -> float:
    """The time since which the run has no view. Where no rank holds a state, it is not before the first rank was ready, since the start of
    processes has no limit."""
    if machine.phase == Phase.RUN or any(rank.state is not None for rank in ranks):
        return machine.assembly.since_s
    return max(machine.assembly.since_s, min((rank.ready_s for rank in ranks), default=machine.assembly.since_s))


def _in_whole_groups(machine: MachineState, ranks: Sequence[Rank]) -> int:
    """How many of ``ranks`` can be in a view: where ranks compute together, each group has one at each coordinate."""
    there = Counter(rank.member.coordinate for rank in ranks)
    return machine.settings.group * min(there[coordinate] for coordinate in machine.settings.coordinates)


def room(machine: MachineState) -> int:
    """How many ranks compute in a whole view. Each group of ranks has at least one shard."""
    settings = machine.settings
    return min(settings.world, settings.shards * settings.group)


def spares_inside(machine: MachineState) -> int:
    """How many spares are in a whole view beside the ranks that compute: those of a sharded run keep a part of the state.

    Where ranks compute a shard together, a spare has no coordinate before it is called, and so no column whose state it could keep.
    """
    settings, view, apart = machine.settings, machine.view, machine.roster.apart
    none_keeps = view is not None and apart.issuperset(view.members)  # a forward of their model counts
    return settings.spares if settings.spread and not settings.in_columns and not none_keeps else 0


def computing(machine: MachineState, size: int) -> int:
    """How many of ``size`` members compute shards: all but spares."""
    return min(size, room(machine)) if spares_inside(machine) else size


def is_incomplete(machine: MachineState, ranks: Sequence[Rank]) -> bool:
    """Whether none of ``ranks`` holds some part of a sharded state. A view has found that, and all clean ones were in it."""
    return bool(machine.assembly.incomplete) and all(
        rank.member in machine.assembly.incomplete for rank in ranks if rank.state is not None and not rank.dirty
    )


def source(ranks: Sequence[Rank], committed: StateId, checkpoint: str | None, useless: bool = False) -> StateSource | None:
    """The clean rank with the greatest state gives it to all ranks with another state: in its column, as one does in each other column.

    A state before ``committed`` does not count: it would roll back committed steps within one history. A column may have
    no other state left. Then a new history begins: from the checkpoint, or from the initial states of a fresh rank of each column. None
    without either. A rank one step behind may have agreed to that step, and holds what it needs to take it.

    Args:
        useless: the run cannot go on from the ranks' states, see ``is_incomplete``.
    """
    clean = [rank.state if not rank.dirty and not useless else None for rank in ranks]
    states = [state if state is not None and state >= committed else None for state in clean]
    greatest = max((state for state in states if state is not None), default=None)
    held = columns([rank.member for rank in ranks]).values()
    if greatest is not None and all(any(_holds(clean[place], greatest, one=len(held) == 1) for place in column) for column in held):
        differ = tuple(i for i, rank in enumerate(ranks) if rank.dirty or rank.state != greatest)
        return StateSource(states.index(greatest), differ, greatest)
    if any(state is not None for state in clean):
        probe("only states from before the last commit are left")
    fresh = [i for i, rank in enumerate(ranks) if checkpoint is not None or (rank.state is None and not rank.dirty)]
    donors = [donor for column in held if (donor := next((place for place in column if place in fresh), None)) is not None]
    if len(donors) < len(held):
        return None
    return StateSource(donors[0], tuple(i for i in range(len(ranks)) if i not in donors), None)


def _holds(state: StateId | None, greatest: StateId, *, one: bool) -> bool:
    """Whether a rank can come to ``greatest`` without a peer of its column. ``one``: there is no other column."""
    behind = None if one else StateId(greatest.history, greatest.step - 1)
    return state is not None and state in (greatest, behind)


def fresh_wanted(ranks: Sequence[Rank]) -> Rank:
    """The first rank of the first column without an initial state, of ``ranks`` that cannot begin."""
    held = columns([rank.member for rank in ranks]).values()
    lacking = (column for column in held if not any(ranks[place].state is None and not ranks[place].dirty for place in column))
    return ranks[next(lacking, (0,))[0]]


LEAST_FIRST = tuple(Engaged)
"""Preferred work of a rank's loop while the rank writes its state beside it, the best first."""


def keepers(machine: MachineState, without: Collection[Member]) -> tuple[StateId | None, tuple[Member, ...]]:
    """(newest state of the last view's members that have left it, the members that write it as the run stops).

    The members whose loops do the least write a state that all hold. All members write a state that none of them holds whole. (None, ()):
    no member can.
    """
    members = machine.view.members if machine.view is not None else ()
    there = [rank for rank in map(machine.current, members) if rank is not None and rank.member.slot not in machine.roster.outstanding]
    clean = [rank for rank in there if rank.state is not None and not rank.dirty and rank.member not in without]
    newest = max((rank.state for rank in clean if rank.state is not None), default=None)
    if newest is None or newest < machine.doubts.floor(machine.committed):
        return None, ()
    holders = [rank for rank in clean if rank.state == newest]
    if not machine.settings.replicated:
        return (newest, members) if len(holders) == len(members) and not is_incomplete(machine, holders) else (None, ())
    least = min(LEAST_FIRST.index(rank.engaged) for rank in holders)
    return newest, tuple(rank.member for rank in holders if LEAST_FIRST.index(rank.engaged) == least)


def grown(members: Sequence[Member], view: View) -> StateSource:
    """The source of a proposal: the first present member gives its state to all newcomers when they enter."""
    present = frozenset(view.members)
    donor = next(i for i, member in enumerate(members) if member in present)
    return StateSource(donor, tuple(i for i, member in enumerate(members) if member not in present), None)
