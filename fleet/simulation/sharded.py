"""A simulated rank with sharded optimizer state, driven as the live one is in :mod:`actors.rank.zero1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet.protocol import moves
from fleet.protocol.chunks import BLOCK, WHOLE, Chunk, Claim, guards, kept, lost, route, settled
from fleet.protocol.domains import Place, number, numbered, place_of
from fleet.protocol.types import StateId, View
from fleet.protocol.vote import Words
from fleet.simulation.clockwork import Future, Steps
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import POISON, SPOILED, updated
from fleet.simulation.steps import SteppingRank, Sum

LENGTH = 60 * BLOCK
"""Of the one flat buffer: a number of blocks that all world sizes of the simulator divide."""


class ShardedRank(SteppingRank):
    """``value`` stands for all chunks that the rank holds, at ``at``; ``weights`` for the parameters, poison while they are incomplete.

    ``log`` is what all shards have contributed to the step that is voted on: with it the step can be taken alone.
    """

    spares_newcomers = False
    spread = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.protocol.sharded = True
        self._depth = len(self.world.settings.domains) + 1
        self.places: Sequence[Place] = ()
        self.chunks: tuple[Chunk, ...] = ()
        self.beside_chunks: tuple[Chunk, ...] = ()
        self.value = POISON
        self.at_state: StateId | None = None
        self.log: dict[int, int] = {}
        self._carriers |= {moves.Resettle: self._resettle, moves.Advance: self._advance}

    # ---- a view begins -----------------------------------------------------------------------------------------------------------------

    def claim(self) -> Claim:
        node = number(place_of(self.node.domain, self.node.name), self._depth)
        if self.at_state is None:
            return Claim(None, node=node)
        chunks = self.chunks + (() if self.vote.keeps else self.beside_chunks)
        return Claim(self.at_state, self.vote.keeps, self.vote.factor, self.weights != POISON, node, chunks)

    def _begin(self, move: moves.Begin) -> Steps:
        yield from super()._begin(move)
        self.chunks, self.value, self.at_state, self.log, self.beside_chunks = (WHOLE,), self.weights, move.view.state, {}, ()

    def _resettle(self, move: moves.Resettle) -> Steps:
        view, group = move.view, self.group
        rank = view.rank_of(self.member)
        received: dict[Any, Claim] = yield group.exchange(self.member, "claims", self.claim())
        claims = [received[member] for member in view.members]
        target = claims[view.donor].state
        if target is None:
            if rank == view.donor:
                self.protocol.receiving()
            raise Broken("the donor holds no state")
        if self.vote.follow(claims, rank, target):
            self.world.note("AT advancing", self, target)
            if self.at("advancing"):
                yield self._pause()
            yield from self.carry(self.rank_machine.take_step(moves.Advance()))
        there = settled(claims, target)
        self._check_lost(view, there)
        yield from self._complete(group, there)
        yield from self._rest(group, there, target)
        yield from self._move(group, there, target)
        self.world.note("moved", self, view.generation, target)
        return target

    def _check_lost(self, view: View, there: Sequence[Claim]) -> None:
        if not lost([claim.chunks for claim in there], LENGTH):
            return
        self.world.note("lost", self, view.generation)
        self.protocol.incomplete()
        raise Broken("no member holds some of the state")

    def _drop(self) -> None:
        self.chunks, self.value, self.at_state, self.log, self.beside_chunks = (), POISON, None, {}, ()
        self.held, self.weights = {}, POISON
        self.vote.begin()

    def _complete(self, group: SimGroup, there: Sequence[Claim]) -> Steps:
        """Parameters that were on their way when a view broke."""
        if all(claim.complete for claim in there if claim.state is not None):
            return
        if self.at("gathering"):
            yield self._pause()
        received = yield group.exchange(self.member, "parameters", (self.weights, self.value))
        rank = group.view.rank_of(self.member)
        if there[rank].state is not None:
            held = [(WHOLE,) if claim.complete else claim.chunks for claim in there]
            values = [
                received[member][0] if claim.complete else received[member][1]
                for member, claim in zip(group.view.members, there, strict=True)
            ]
            if self.weights == POISON:
                self.weights = self._assembled(held, values, (WHOLE,), rank)
                self._note_commit()

    def _note_commit(self) -> None:
        assert self.at_state is not None
        self.world.watch.commit(self, self.at_state)

    @staticmethod
    def _assembled(
        held: Sequence[Sequence[Chunk]], values: Sequence[int], wanted: Sequence[Chunk], rank: int, places: Sequence[Place] = ()
    ) -> int:  # fmt: skip
        """What ``wanted`` holds once all its stretches have come; poison when they are not of one state."""
        stretches = [one for one in route(held, wanted, LENGTH, rank, places) if one.lo < one.hi]
        found = {values[one.source] if one.source >= 0 else POISON for one in stretches}
        return found.pop() if len(found) == 1 else POISON

    def _rest(self, group: SimGroup, there: Sequence[Claim], target: StateId) -> Steps:
        """All but the chunks comes from the donor, to whoever holds nothing."""
        rank = group.view.rank_of(self.member)
        if rank == group.view.donor and any(claim.state is None for claim in there):
            yield from self._post(group, target, Future())
        elif there[rank].state is None:
            self.protocol.receiving()
            self._drop()
            yield from self._put_in_place(group, *(yield group.receive_state(self.member)))

    def _move(self, group: SimGroup, there: Sequence[Claim], target: StateId) -> Steps:
        """Each chunk to its owner and its guards; the old ones are dropped once all have the new."""
        view = group.view
        rank = view.rank_of(self.member)
        places = [numbered(claim.node, self._depth) for claim in there]
        guarded = guards(places, self.world.settings.optimizer_copies, self.world.settings.replica_ranks)
        received = yield group.exchange(self.member, "pieces", self.value)
        wanted = kept(guarded, rank)
        values = [received[member] for member in view.members]
        value = self._assembled([claim.chunks for claim in there], values, wanted, rank, places)
        if self.at("placing"):
            yield self._pause()
        yield self.rng.uniform(0.01, 0.1)
        try:
            yield group.exchange(self.member, "placed", None)
        except Broken:
            if there[rank].state is not None:  # somebody may have dropped what it had
                self._keep_beside(wanted)
            raise
        self.places = places
        self._adopt(view, guarded, value, target)
        if self.at("placed"):
            yield self._pause()

    def _keep_beside(self, wanted: tuple[Chunk, ...]) -> None:
        self.beside_chunks = tuple(chunk for chunk in dict.fromkeys(self.beside_chunks + wanted) if chunk not in self.chunks)

    def _adopt(self, view: View, guarded: Sequence[Sequence[int]], value: int, target: StateId) -> None:
        self.chunks = kept(guarded, view.rank_of(self.member))
        self.value, self.at_state, self.log, self.beside_chunks = value, target, {}, ()
        self.world.watch.placed(self, view, guarded, target, value)

    # ---- a step ------------------------------------------------------------------------------------------------------------------------

    def _cast_vote(self, move: moves.CastVote) -> Steps:
        assert isinstance(move.reduced, Sum)
        members, reduced = self.rank_machine.view.members, move.reduced
        self.log = reduced.merged
        if self.at("ready"):
            yield self._pause()
        said: dict[Any, bool] = {}
        if voters := self.vote.voters(len(members)):
            said = yield self.group.exchange(self.member, ("ready", reduced.number), self._is_finite())
        if self.at("decided"):
            yield self._pause()
        return Words(tuple(said[members[rank]] for rank in voters))

    def _is_finite(self) -> bool:
        """In this rank's own chunk, to which so many shards bring what is not."""
        view = self.rank_machine.view
        size, mine = len(view.members), view.rank_of(self.member)
        return not any(value == SPOILED and shard % size == mine for shard, value in self.log.items())

    def _apply(self, move: moves.Apply) -> Steps:
        assert isinstance(move.reduced, Sum)
        self.world.watch.agreed(self, self.rank_machine.view, move.reduced.number, move.enter, move.save)
        yield from self._advance(move)

    def _advance(self, move: moves.Apply | moves.Advance) -> Steps:
        """Each steps its chunks by itself."""
        contributions, before = self.log, self.value
        self.value = self.weights = POISON
        self.held, self.log, self.beside_chunks = {}, {}, ()
        if self.at("mutating"):
            yield self._pause()
        yield self.rng.uniform(0.001, 0.02)
        self.value = updated(before, contributions, self.world.settings.shards)
        self._take_up()
        self.at_state = self.duties.at

    def _committed(self, move: moves.StepCommitted) -> Steps:
        if self.at("gathering"):
            yield self._pause()
        view = self.rank_machine.view
        received = yield self.group.exchange(self.member, "parameters", (self.chunks, self.value))
        ranked = [received[member] for member in view.members]
        held, parts = [chunks for chunks, _ in ranked], [value for _, value in ranked]
        self.weights = self._assembled(held, parts, (WHOLE,), view.rank_of(self.member))
        self._note_commit()
        if self.at("committed"):
            yield self._pause()
