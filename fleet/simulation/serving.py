"""Checkers of sharded state, of parameters that are gathered on demand, of the copies for both, and of groups that compute together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.machine.core import FleetMachine
from fleet.protocol.causes import Evicted, NoProgress
from fleet.protocol.chunks import Chunk, StateCut, lost, settled
from fleet.protocol.instructions import Instruction, Propose, Publish
from fleet.protocol.records import Committed, ProcessLost, Record, ViewPublished
from fleet.protocol.types import Coordinate, Member, StateId, View, columns
from fleet.simulation.checker import InvariantChecker
from fleet.simulation.gathering import Fetched
from fleet.simulation.model import SPOILED
from fleet.simulation.ranks import SimRank
from fleet.simulation.sharded import LENGTH, SLICES
from fleet.simulation.stage import Stage

AT_ONCE = frozenset({"kill", "raise", "lose_node", "join", "coordinator"})
"""Kinds of trouble behind which no rank stands still for long."""
LATELY_S = 12.0
"""Seconds. A keeper that stood still, or could not be reached, within so long may have been asked at that time."""


class Gathers(InvariantChecker):
    """5, with sharded parameters: a step is computed from committed parameters alone, of exactly the state from which it begins."""

    name = "gathers"

    def served(self, rank: SimRank, server: SimRank, state: StateId, fetched: Fetched, chunk: Chunk) -> None:
        """``rank`` has got parameters of ``state`` from ``server``."""
        here = rank.protocol.state
        self.require(state == here, f"{rank} begins a step from {here}, and gathers parameters of {state}")
        self.require(fetched.state == state, f"{server} is at {fetched.state} and serves {rank} parameters of {state}")
        right = self.fault_free(fetched.value, state) or server.layout.corrupt
        self.require(right, f"{server} serves {rank} other parameters than those of {state}")


class GradientsAdded(InvariantChecker):
    """6, with sharded parameters: the owner of a chunk has each shard's gradient, and it is that of the rank that reports the shard.

    One that is not finite may be of a rank that was lost meanwhile: then all ranks compute the step once more.
    """

    name = "sums"

    def summed(self, rank: SimRank, chunk: Chunk, sums: Mapping[int, int], merged: Mapping[int, int]) -> None:
        """``rank`` owns ``chunk``, and all ranks have reported their shards: ``merged``."""
        lacking = sorted(merged.keys() - sums.keys())
        self.require(not lacking, f"{rank} owns chunk {chunk}, and lacks the gradients of shards {lacking}")
        other = sorted(shard for shard, value in merged.items() if sums[shard] != value and SPOILED not in (sums[shard], value))
        self.require(not other, f"{rank} has other gradients of shards {other} than the ranks that report them")


class SparesKeep(InvariantChecker):
    """5, for spares in a view of a sharded run: they have room for a part of the state, never newer than all ranks' sums allow."""

    name = "spares"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._computed, self._sent = set[Member](), set[int]()

    def record(self, record: Record) -> None:
        if not isinstance(record, ViewPublished):
            return
        view, settings = record.view, self.world.settings
        self._computed |= {view.members[rank] for rank in view.computing}
        if not view.spares:
            return
        self.require(bool(settings.spread), f"generation {view.generation} has spares, and each rank has the whole state")
        self.require(
            view.computing == tuple(range(len(view.computing))), f"spares of generation {view.generation} are not its last members"
        )
        for member in set(view.spares) - self._computed:
            self.require(member.slot not in self.world.plan.roomless, f"{member} has no room for a part of the state, and gets one")

    def sent(self, machine: FleetMachine, instruction: Instruction) -> None:
        if isinstance(instruction, Publish | Propose) and instruction.view.generation not in self._sent:
            self._sent.add(instruction.view.generation)
            view, settings = instruction.view, machine.state.settings
            most = min(len(view.members), settings.world, settings.shards * settings.group)
            self.require(
                len(view.computing) >= most, f"of generation {view.generation} {len(view.computing)} ranks compute, and could {most}"
            )

    def commit(self, rank: SimRank, state: StateId) -> None:
        view = rank.protocol.view
        if view is None or rank.member not in view.spares:
            return
        for member in view.members:
            other = self.process(member)
            if other is not None and other.alive and other.protocol.view is view and other.protocol.state is not None:
                behind = other.protocol.state
                fits = behind.history != state.history or behind.step >= state.step or other.rank_machine.vote.keeps
                self.require(fits, f"the part of spare {rank} is of {state}, and {other} is at {behind} without its sums")


class _Reaches(InvariantChecker):
    """A checker that knows which keepers a rank could have asked."""

    def _could(self, rank: SimRank, keeper: SimRank) -> bool:
        cut = self.world.links.was_cut(rank.end, keeper.end, LATELY_S)
        return keeper.alive and not self._was_still(keeper) and not cut

    def _was_still(self, rank: SimRank) -> bool:
        return rank.still.stopped or self.world.clock.now_s - rank.still.went_on_s < LATELY_S


class Serves(_Reaches):
    """With sharded parameters: a rank computes its shard wherever it can reach a keeper of each chunk."""

    name = "serves"

    def missed(self, rank: SimRank, state: StateId, keepers: Sequence[SimRank], chunk: Chunk) -> None:
        """No keeper has given ``rank`` the chunk. A keeper in another view by now has other chunks of the same state."""
        if rank.rank_machine.wanted or self._was_still(rank):
            return
        there = [one for one in keepers if one is not rank and one.layout.kept.at == state and one.layout.kept.has(chunk)]
        can = [keeper for keeper in there if self._could(rank, keeper)]
        self.require(not can, f"{rank} computes nothing, as no rank serves it parameters of {state}; {', '.join(map(str, can))} could")

    def cut(self, rank: SimRank, generation: int, view: View) -> None:
        """``rank`` leaves ``view``, since it missed a part of the parameters in ``generation``."""
        self.require(generation == view.generation, f"{rank} breaks generation {view.generation} for what it missed in {generation}")


class Near(_Reaches):
    """With groups: a member of a full group gathers within it, unless the group's keeper of the chunk is lost or called away."""

    name = "near"

    def served(self, rank: SimRank, server: SimRank, state: StateId, fetched: Fetched, chunk: Chunk) -> None:
        view, groups, (size, owner) = rank.protocol.view, self.world.settings.replica_ranks, chunk
        if groups == 1 or view is None or rank.rank_machine.wanted or self._was_still(rank):
            return
        if rank.layout.kept.recut is not None:
            return  # it goes on with the chunks of an earlier view
        column = view.column_of(rank.member)
        group = column.rank_of(rank.member) // groups
        if group >= size // groups or column.rank_of(server.member) // groups == group:
            return
        near = self.process(column.members[group * groups + owner % groups])
        can = near is not None and near.layout.kept.at == state and near.protocol.view == view and self._could(rank, near)
        self.require(not can, f"{rank} is served chunk {owner} by {server}, of another group, while {near} of its own could serve it")


class Copies(InvariantChecker):
    """5, with sharded state: once a view has formed, no chunk lacks promised copies for longer than a step. Every full group holds all
    chunks."""

    name = "copies"

    def commit(self, rank: SimRank, state: StateId) -> None:
        """All members of the view have taken this step, or are about to. They hold the copies that were promised when the view formed."""
        view = rank.protocol.view
        if rank.layout.kept is None or view is None or rank.protocol.forming or rank.layout.kept.recut is not None:
            return
        column = view.column_of(rank.member).members
        there = [one for one in map(self.process, column) if one is not None and one.alive and one.protocol.view == view]
        size = len(column)
        if len(there) < size:
            return  # a member is lost already, or called away: the next view is about to form
        copies, groups = min(self.world.settings.optimizer_copies, size - 1), self.world.settings.replica_ranks
        full = size // groups if groups > 1 else 0
        near, here = (state, StateId(state.history, state.step - 1)), [one.layout.kept for one in there]
        for owner in range(size):
            keep = [place for place, kept in enumerate(here) if kept.at in near and (size, owner) in kept.promised(place)]
            expected = 1 + max(copies, full - (owner // groups < full))
            few = f"of chunk {owner} of {size} in generation {view.generation} there are {len(keep)} at {state}, {expected} are due"
            self.require(len(keep) >= expected, few)
            lack = set(range(full)) - {place // groups for place in keep}
            self.require(not lack, f"group {lack} of generation {view.generation} lacks chunk {owner} of {size}")


class TwoPhase(InvariantChecker):
    """5, where no rank has the whole state: all members begin a view at one step, and no part is lost while one copy lives."""

    name = "two-phase"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._targets: dict[tuple[int, str], StateId] = {}
        self._cuts: dict[tuple[int, str, Coordinate], StateCut] = {}
        self._history = 0

    def begins(self, rank: SimRank, view: View, cut: StateCut, state: StateId, value: int) -> None:
        """``rank`` begins ``view`` with its chunks of ``cut``."""
        target = self._targets.setdefault((view.generation, view.store), state)
        first = self._cuts.setdefault((view.generation, view.store, rank.protocol.coordinate), cut)
        self.require(state == target, f"{rank} begins generation {view.generation} at {state}, another at {target}")
        self.require(cut == first, f"{rank} begins generation {view.generation} with {cut}, another with {first}")
        self._is_right(rank, view, state, value)

    def _is_right(self, rank: SimRank, view: View, state: StateId, value: int) -> None:
        right = value == self.world.chain.weights(state.step) or rank.layout.corrupt or self.excused(state)
        self.require(right, f"{rank} has chunks of another state than {state} in generation {view.generation}")

    def placed(self, rank: SimRank, view: View, cut: StateCut, state: StateId, value: int) -> None:
        """All chunks that ``rank`` is to keep in ``view`` are in place."""
        self._is_right(rank, view, state, value)
        copies = min(self.world.settings.optimizer_copies, len(view.column_of(rank.member).members) - 1)
        for owner, keepers in enumerate(cut.keepers):
            few = len(set(keepers)) <= copies
            self.require(not few, f"chunk {owner} of generation {view.generation} is kept by {keepers}, and {copies} copies are due")

    def record(self, record: Record) -> None:
        """No history is given up while the members of the next view hold its whole state."""
        if not isinstance(record, ViewPublished) or record.graceful:
            return
        view, last = record.view, self._history
        self._history = max(last, view.state.history)
        members = [rank for rank in map(self.process, view.members) if rank is not None and rank.protocol.sharded and rank.alive]
        claims = {rank.member: rank.layout.claim() for rank in members}
        target = max((claim.state for claim in claims.values() if claim.state is not None), default=None)
        if target is None or target.history != last or view.state.history == last or target < self._committed():
            return
        if target.step <= view.state.step:
            return  # no step is given up: the new history begins at the end of this one
        there = dict(zip(claims, settled(list(claims.values()), target), strict=True))
        gone = any(
            lost([there[view.members[place]].chunks for place in column if view.members[place] in there], LENGTH)
            for column in columns(view.members).values()
        )
        self.require(
            gone or self.world.flipped,
            f"generation {view.generation} gives up {target}, and its members {[str(rank) for rank in members]} hold all of it",
        )

    def _committed(self) -> StateId:
        return max((record.state for record in self.world.journal if isinstance(record, Committed)), default=StateId(0, 0))


class Recuts(InvariantChecker):
    """With sharded state: chunks come to the ranks that are to keep them within a few steps of a view."""

    name = "recuts"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._commits: Counter[tuple[int, str, Member]] = Counter()

    def commit(self, rank: SimRank, state: StateId) -> None:
        view = rank.protocol.view
        if rank.layout.kept is None or view is None or rank.protocol.forming or rank.layout.kept.recut is None:
            return
        self._commits[view.generation, view.store, rank.member] += 1
        steps = self._commits[view.generation, view.store, rank.member]
        self.require(steps <= SLICES + 2, f"{steps} steps of generation {view.generation} have not brought {rank} its chunks")


class Together(InvariantChecker):
    """6, with groups of ranks that compute a shard together: all compute the same shard of the same step, and each is at a coordinate."""

    name = "together"

    def computed_together(self, rank: SimRank, met: Mapping[Member, tuple[int, int]]) -> None:
        """``rank`` has met the others of its group for a shard: (step, shard) by member."""
        self.require(len(set(met.values())) == 1, f"{rank} computes with others that compute something else: {met}")

    def sent(self, machine: FleetMachine, instruction: Instruction) -> None:
        if isinstance(instruction, Publish | Propose) and self.world.settings.mesh:
            wanted, members = list(self.world.settings.coordinates), instruction.view.members
            if self.world.settings.staged:
                there = {member.coordinate for member in members}
                self.require(there == set(wanted), f"generation {instruction.view.generation} has ranks at {sorted(there)} alone")
                return
            for first in range(0, len(members), len(wanted)):
                group = [member.coordinate for member in members[first : first + len(wanted)]]
                self.require(group == wanted, f"a group of generation {instruction.view.generation} has the coordinates {group}")

    def joining(self, rank: SimRank, view: View) -> None:
        place = view.members[view.rank_of(rank.member)]
        self.require(
            place.coordinate == rank.protocol.coordinate, f"{rank} is at {rank.protocol.coordinate}, and in a view at {place.coordinate}"
        )


class EachUnit(InvariantChecker):
    """6, where the model is cut into stages: in one attempt at a step no two ranks compute a unit. No rank waits for one for ever."""

    name = "each unit"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._by: dict[Any, SimRank] = {}
        self._stands = any(trouble.kind not in AT_ONCE for trouble in world.plan.troubles)

    def unit(self, rank: SimRank, view: View, attempt: Any, stage: int, shard: int) -> None:
        """``rank`` has computed its unit of ``shard``. ``attempt``: (state, number of the attempt in ``view``)."""
        first = self._by.setdefault((view.generation, view.store, attempt, stage, shard), rank)
        self.require(first is rank, f"stage {stage} of shard {shard} at {attempt} is computed by {first} and by {rank}")

    def record(self, record: Record) -> None:
        if self.world.settings.staged and isinstance(record, ProcessLost) and isinstance(record.cause, Evicted):
            stuck = isinstance(record.cause.why, NoProgress)
            self.require(self._stands or not stuck, f"{record.member} has waited for a unit that no rank has given: {record.cause.why}")
