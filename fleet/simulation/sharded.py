"""Simulated ranks with sharded optimizer state, like live ranks in :mod:`actors.rank.zero1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.protocol.chunks import BLOCK, WHOLE, Chunk, Claim, bounds, guards, kept, lost, route, settled
from fleet.protocol.domains import Place, number, numbered, place_of
from fleet.protocol.moves import Advance, Begin
from fleet.protocol.types import Member, StateId, View
from fleet.simulation.clockwork import Future, Steps
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import POISON, SPOILED
from fleet.simulation.ranks import SimLayout, SimRank

LENGTH = 60 * BLOCK
"""Length of the one flat buffer: a number of blocks that all world sizes of the simulator divide."""


class SimChunks:
    """The chunks of a sharded state that one rank keeps, and their move to new places when a view begins.

    Attributes:
        chunks: the rank's own chunk, and copies of others. ``value`` stands for all of them, at the state ``at``. None: it holds none.
        beside: chunks that came for a view that did not form.
        places: by rank of the last column, its place.
    """

    def __init__(self, layout: SimLayout) -> None:
        self.layout, self.rank = layout, layout.rank
        self._depth = len(self.rank.world.settings.domains) + 1
        self.places: Sequence[Place] = ()
        self.hold((), POISON, None)

    def hold(self, chunks: tuple[Chunk, ...], value: int, at: StateId | None) -> None:
        """Hold these chunks, and no others."""
        self.chunks, self.value, self.at = chunks, value, at
        self.beside: tuple[Chunk, ...] = ()

    def has(self, chunk: Chunk) -> bool:
        lo, hi = bounds(LENGTH, chunk)
        return any(start <= lo and hi <= stop for start, stop in (bounds(LENGTH, one) for one in self.chunks))

    def claim(self) -> Claim:
        """This rank's claim."""
        complete, node = self.layout.weights != POISON, number(place_of(self.rank.node.domain, self.rank.node.name), self._depth)
        return self.rank.rank_machine.vote.claim(self.at, self.chunks, self.beside, complete=complete, node=node)

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def word(self, sums: Mapping[int, int]) -> bool:
        """Whether this rank's own chunk of the sums is finite. Of the shards, every ``size``-th one contributes to it here."""
        column = self.rank.rank_machine.view.column_of(self.rank.member)
        size, mine = len(column.members), column.rank_of(self.rank.member)
        return not any(value == SPOILED and shard % size == mine for shard, value in sums.items())

    def take_out(self) -> int:
        """The chunks are about to change. Gives the old value."""
        before, self.value, self.layout.weights, self.beside = self.value, POISON, POISON, ()
        return before

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def resettle(self, view: View) -> Steps:
        """Move the chunks. Gives the state that all hold then. Raises Broken: ranks keep their chunks, as they were or a step further."""
        rank, group, layout, column = self.rank, self.rank.group, self.layout, view.column_of(self.rank.member)
        me = column.rank_of(rank.member)
        received: dict[Member, Claim] = yield group.exchange(rank.member, "claims", self.claim())
        claims = [received[member] for member in column.members]
        target = claims[column.donor].state
        if target is None:
            if me == column.donor:
                rank.protocol.receiving()
            raise Broken("the donor holds no state")
        if rank.rank_machine.vote.follow(claims, me, target):
            rank.world.note("AT advancing", rank, target)
            yield from rank.point("advancing")
            yield from rank.carry(rank.rank_machine.take_step(Advance()))
        there = settled(claims, target)
        if lost([claim.chunks for claim in there], LENGTH):
            rank.world.note("lost", rank, view.generation)
            rank.protocol.incomplete()
            raise Broken("no member holds some of the state")
        yield from layout.gather(group, there)
        yield from self._rest(group, there, target)
        with layout.moving():
            yield from layout.introduce(group)
            yield from self._move(group, there, target)
        rank.world.note("moved", rank, view.generation, target)
        return target

    def _rest(self, group: SimGroup, there: Sequence[Claim], target: StateId) -> Steps:
        """The donor gives all of the state but the chunks to the ranks that hold no state."""
        rank, layout, column = self.rank, self.layout, group.view.column_of(self.rank.member)
        me = column.rank_of(rank.member)
        if me == column.donor and any(claim.state is None for claim in there):
            yield from layout.post(group, target, Future())
        elif there[me].state is None:
            rank.protocol.receiving()
            self.hold((), POISON, None)
            layout.reset()
            layout.weights = POISON
            rank.rank_machine.vote.begin()
            yield from layout.put_in_place(group, *(yield group.receive_state(rank.member)))

    def _move(self, group: SimGroup, there: Sequence[Claim], target: StateId) -> Steps:
        """Move each chunk to its owner and its guards. Ranks drop old chunks once all have the new ones."""
        rank, column, settings = self.rank, group.view.column_of(self.rank.member), self.rank.world.settings
        me = column.rank_of(rank.member)
        places = [numbered(claim.node, self._depth) for claim in there]
        guarded = guards(places, settings.optimizer_copies, settings.replica_ranks)
        received: dict[Member, int] = yield group.exchange(rank.member, "pieces", self.value)
        wanted = kept(guarded, me)
        values = [received[member] for member in column.members]
        value = assembled([claim.chunks for claim in there], values, wanted, me, places)
        yield from rank.point("placing")
        yield rank.rng.uniform(0.01, 0.1)
        try:
            yield group.exchange(rank.member, "placed", None)
        except Broken:
            if there[me].state is not None:  # another rank may have dropped its old chunks
                self.beside = tuple(chunk for chunk in dict.fromkeys(self.beside + wanted) if chunk not in self.chunks)
            raise
        self.places = places
        self.hold(kept(guarded, me), value, target)
        rank.world.watch.placed(rank, group.view, guarded, target, value)
        self.layout.place(column, guarded)
        yield from rank.point("placed")


def assembled(
    held: Sequence[Sequence[Chunk]], values: Sequence[int], wanted: Sequence[Chunk], rank: int, places: Sequence[Place] = ()
) -> int:  # fmt: skip
    """The value of ``wanted`` once all its stretches have come; poison when they are not of one state."""
    stretches = [one for one in route(held, wanted, LENGTH, rank, places) if one.lo < one.hi]
    found = {values[one.source] if one.source >= 0 else POISON for one in stretches}
    return found.pop() if len(found) == 1 else POISON


class SimZero1Layout(SimLayout):
    """Each rank steps its chunks, and has the whole parameters. ``weights`` are incomplete until all ranks have sent theirs."""

    kept: SimChunks
    spares_newcomers = False

    def __init__(self, rank: SimRank) -> None:
        super().__init__(rank)
        self.kept = SimChunks(self)

    def begin(self, move: Begin) -> Steps:
        yield from super().begin(move)
        self.kept.hold((WHOLE,), self.weights, move.view.state)

    def word(self, sums: Mapping[int, int]) -> bool:
        return self.kept.word(sums)

    def take_out(self) -> int:
        return self.kept.take_out()

    def put_back(self, value: int, at: StateId) -> None:
        self.kept.hold(self.kept.chunks, value, at)

    def publish(self) -> Steps:
        yield from self.rank.point("gathering")
        self.weights = yield from self._gathered(self.rank.group, self.kept.chunks, self.kept.value)
        self.rank.world.watch.commit(self.rank, self.kept.at)

    def gather(self, group: SimGroup, there: Sequence[Claim]) -> Steps:
        """Complete parameters that were on their way when a view broke."""
        if all(claim.complete for claim in there if claim.state is not None):
            return
        yield from self.rank.point("gathering")
        mine = there[group.view.column_of(self.rank.member).rank_of(self.rank.member)]
        held = ((WHOLE,), self.weights) if mine.complete else (mine.chunks, self.kept.value)
        weights = yield from self._gathered(group, *held)
        if mine.state is not None and self.weights == POISON:
            self.weights = weights
            self.rank.world.watch.commit(self.rank, self.kept.at)

    def _gathered(self, group: SimGroup, chunks: Sequence[Chunk], value: int) -> Steps:
        """All parameters. Each rank gives those of its ``chunks``."""
        received: dict[Member, Any] = yield group.exchange(self.rank.member, "parameters", (chunks, value))
        column = group.view.column_of(self.rank.member)
        shares = [received[member] for member in column.members]
        return assembled([one[0] for one in shares], [one[1] for one in shares], (WHOLE,), column.rank_of(self.rank.member))
