"""Simulated ranks with sharded optimizer state, like live ranks in :mod:`actors.rank.zero1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.protocol.chunks import (
    BLOCK,
    UNCUT,
    WHOLE,
    Chunk,
    Claim,
    StateCut,
    ViewState,
    bounds,
    cut_of,
    guards,
    lost,
    route,
    settled,
    to_begin_with,
)
from fleet.protocol.domains import Place, number, numbered, place_of
from fleet.protocol.moves import Advance, Begin
from fleet.protocol.recut import Recut
from fleet.protocol.types import Member, StateId, View, columns
from fleet.simulation.clockwork import Future, Steps
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import POISON, SPOILED
from fleet.simulation.ranks import SimLayout, SimRank

LENGTH = 60 * BLOCK
"""Length of the one flat buffer: a number of blocks that all world sizes of the simulator divide."""
SLICES, FIRST = 4, LENGTH // 12
"""Slices of a chunk that moves, and elements that move beside the first step: so few that a move takes several steps."""


def come_to_one(rank: SimRank, members: Sequence[Member], donor: int, mine: Claim) -> Steps:
    """Like :func:`actors.rank.zero1.resharding.come_to_one`."""
    received: dict[Member, Claim] = yield rank.group.exchange(rank.member, "claims", mine)
    claims, me = [received[member] for member in members], members.index(rank.member)
    target = claims[donor].state
    if target is None:
        if me == donor:
            rank.protocol.receiving()
        raise Broken("the donor holds no state")
    if rank.rank_machine.vote.follow(claims, me, target):
        rank.world.note("AT advancing", rank, target)
        yield from rank.point("advancing")
        yield from rank.carry(rank.rank_machine.take_step(Advance()))
    return claims, target


class SimChunks:
    """The chunks of a sharded state that one rank keeps, and their move to new places.

    Attributes:
        chunks: the rank's own chunks, and copies of others. ``value`` stands for all of them, at the state ``at``. None: it holds none.
        beside: chunks that came for a view that did not form.
        places: by rank of the last column, its place.
        cut: of the last view. ``recut``: the way to the next one; None: all chunks are where they belong.
        more: slices that are in place beside ``chunks``; ``more_value`` stands for them.
        digested_at: the last state at which this rank has said before a sum what its chunks are.
        settled_at: the state of which this rank knows in this view what its chunks were behind the commit.
    """

    digested_at: StateId | None = None
    settled_at: StateId | None = None

    def __init__(self, layout: SimLayout) -> None:
        self.layout, self.rank = layout, layout.rank
        self._depth = len(self.rank.world.settings.domains) + 1
        self.places: Sequence[Place] = ()
        self.cut = UNCUT
        self.recut: Recut | None = None
        self._coming: Future | None = None
        self._summed: tuple[Chunk, ...] = ()
        self._before = POISON
        self.hold((), POISON, None)

    def hold(self, chunks: tuple[Chunk, ...], value: int, at: StateId | None) -> None:
        """Hold these chunks, and no others."""
        self.chunks, self.value, self.at = chunks, value, at
        self.beside: tuple[Chunk, ...] = ()
        self.more: tuple[Chunk, ...] = ()
        self.more_value = POISON

    def has(self, chunk: Chunk) -> bool:
        lo, hi = bounds(LENGTH, chunk)
        return any(start <= lo and hi <= stop for start, stop in (bounds(LENGTH, one) for one in self.chunks))

    def _worth(self, chunks: tuple[Chunk, ...]) -> int:
        """The value of ``chunks``, slices that are in place beside the others included; poison where the rank lacks some element."""
        if _covers(self.chunks + self.beside, chunks):
            return self.value
        return self.value if self.more_value == self.value and _covers(self.chunks + self.more + self.beside, chunks) else POISON

    def claim(self) -> Claim:
        """This rank's claim."""
        complete, node = self.layout.weights != POISON, number(place_of(self.rank.node.domain, self.rank.node.name), self._depth)
        chunks, adding = self.chunks + self.more, self.layout.adding
        return self.rank.rank_machine.vote.claim(self.at, chunks, self.beside, complete=complete, node=node, adding=adding)

    @property
    def digests(self) -> tuple[int, ...]:
        """Of the chunks that this rank keeps, in order."""
        me = self.rank.rank_machine.view.column_of(self.rank.member).rank_of(self.rank.member)
        return (self.value,) * len(self.cut.kept(me))

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def word(self, sums: Mapping[int, int]) -> bool:
        """Whether this rank's own chunks of the sums are finite. To each chunk some of the shards contribute here."""
        me, size = self.rank.rank_machine.view.column_of(self.rank.member).rank_of(self.rank.member), self.cut.size
        mine = {index for _, index in self.cut.owned(me)}
        return not any(value == SPOILED and shard % size in mine for shard, value in sums.items())

    def take_out(self) -> int:
        """The chunks are about to change. Gives the old value."""
        before, self.value, self.layout.weights, self.beside = self.value, POISON, POISON, ()
        self._before = before
        return before

    def put_back(self, value: int, at: StateId, *, turns: bool) -> None:
        """The chunks have changed, and the slices that are in place with them, where their sums have come."""
        follows = self.more_value == self._before and self._summed == self.more
        more, more_value = self.more, value if follows else POISON
        self.hold(self.chunks, value, at)
        self.more, self.more_value, self._summed = more, more_value if more else POISON, ()
        if turns:
            self._turn()

    # ---- chunks that move beside the steps -----------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """All ranks have taken a step: the next slices leave."""
        if self.recut is not None and self.recut.begin():
            members = self.rank.rank_machine.view.column_of(self.rank.member).members
            self._coming = self.rank.group.exchange(self.rank.member, ("slices", self.at), (self.value, self.at), members)

    def arrive(self) -> Steps:
        """Before the vote on a step: put the slices in place that are under way. The sums of this step go to all of them."""
        if self.recut is None:
            return
        column = self.rank.rank_machine.view.column_of(self.rank.member)
        me = column.rank_of(self.rank.member)
        if self._coming is not None:
            received: dict[Member, tuple[int, StateId | None]] = yield self._coming
            self._coming = None
            yield from self.rank.point("slices")
            found = {received[column.members[one.source]] for _, one in self.recut.under_way(me)}
            found |= {(self.more_value, self.at)} if self.more else set()
            assert self.at is not None
            self.recut.end(late=self.at.step % 3 == 0)
            self.more = self.recut.claimed(me)
            self.more_value = self.value if found <= {(self.value, self.at)} else POISON
        self._summed = self.more

    def promised(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks that this rank keeps, or will keep behind this step, as view rank ``rank``."""
        return self.recut.wanted.kept(rank) if self.recut is not None and self.recut.over else self.chunks

    def _turn(self) -> None:
        """If all slices are in place, keep the chunks of the new cut alone."""
        recut, view = self.recut, self.rank.rank_machine.view
        if recut is None or not recut.over:
            return
        column = view.column_of(self.rank.member)
        me = column.rank_of(self.rank.member)
        value = self._worth(recut.wanted.kept(me))
        self.cut, self.recut = recut.wanted, None
        self.hold(self.cut.kept(me), value, self.at)
        self.layout.weights = value if self.layout.weights != POISON else POISON
        self.layout.turn_to(self.cut)
        self.rank.world.watch.placed(self.rank, view, self.cut, self.at, value)
        self.rank.world.note("turned", self.rank, self.at)

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def resettle(self, view: View) -> Steps:
        """Move the chunks. All hold the state then. Raises Broken: ranks keep their chunks, as they were or a step further."""
        rank, group, layout = self.rank, self.rank.group, self.layout
        self._coming = None
        claims, target = yield from come_to_one(rank, view.members, view.donor, self.claim())
        everywhere, held = settled(claims, target), columns(view.members)
        if any(lost([everywhere[each].chunks for each in ranks], LENGTH) for ranks in held.values()):
            rank.world.note("lost", rank, view.generation)
            rank.protocol.incomplete()
            raise Broken("no member of a column holds some of its state")
        there = [everywhere[each] for each in held[view.members[view.rank_of(rank.member)].coordinate]]
        yield from layout.gather(group, there)
        yield from self._rest(group, there, target)
        with layout.moving():
            yield from layout.introduce(group)
            yield from self._settle(group, there, target)
        rank.world.note("moved", rank, view.generation, target)
        return ViewState(target)

    def _settle(self, group: SimGroup, there: Sequence[Claim], target: StateId) -> Steps:
        """Go on with the chunks that are here, or move them first."""
        column, settings, watch = group.view.column_of(self.rank.member), self.rank.world.settings, self.rank.world.watch
        me = column.rank_of(self.rank.member)
        self.places = [numbered(claim.node, self._depth) for claim in there]
        wanted = cut_of(guards(self.places, settings.optimizer_copies, settings.replica_ranks))
        cut = to_begin_with([claim.chunks for claim in there], wanted, [claim.adding for claim in there])
        if cut is None:
            yield from self._move(group, there, wanted, target)
        else:
            has_none = there[me].state is None
            value = self.layout.weights if has_none else self._worth(cut.kept(me))
            self.hold(cut.kept(me), value, target)
        self.cut, self.recut = cut or wanted, None
        watch.begins(self.rank, group.view, self.cut, target, self.value)
        self.layout.place(column, self.cut, inherited=cut is not None)
        if self.cut != wanted:
            self.recut = Recut(self.cut, wanted, len(there), (LENGTH,), self.places, first=FIRST, slices=SLICES)
        else:
            watch.placed(self.rank, group.view, self.cut, target, self.value)
        yield from self.rank.point("placed")

    def _rest(self, group: SimGroup, there: Sequence[Claim], target: StateId) -> Steps:
        """The donor, or another rank in its place, gives all of the state but the chunks to the ranks that hold no state."""
        rank, layout, column = self.rank, self.layout, group.view.column_of(self.rank.member)
        me, holders = column.rank_of(rank.member), [place for place, claim in enumerate(there) if claim.state is not None]
        if me == min(holders, key=lambda place: place != column.donor) and len(holders) < len(there):
            yield from layout.post(group, target, Future())
        elif there[me].state is None:
            rank.protocol.receiving()
            self.hold((), POISON, None)
            layout.reset()
            layout.weights = POISON
            rank.rank_machine.vote.begin()
            yield from layout.put_in_place(group, *(yield group.receive_state(rank.member)))

    def _move(self, group: SimGroup, there: Sequence[Claim], cut: StateCut, target: StateId) -> Steps:
        """Move each chunk to its owner and its guards. Ranks drop old chunks once all have the new ones."""
        rank, column = self.rank, group.view.column_of(self.rank.member)
        me = column.rank_of(rank.member)
        received: dict[Member, int] = yield group.exchange(rank.member, "pieces", self.value, column.members)
        wanted = cut.kept(me)
        values = [received[member] for member in column.members]
        value = assembled([claim.chunks for claim in there], values, wanted, me, self.places)
        yield from rank.point("placing")
        yield rank.rng.uniform(0.01, 0.1)
        try:
            yield group.exchange(rank.member, "placed", None, column.members)
        except Broken:
            if there[me].state is not None:  # another rank may have dropped its old chunks
                self.beside = tuple(chunk for chunk in dict.fromkeys(self.beside + wanted) if chunk not in self.chunks)
            raise
        self.hold(wanted, value, target)


def _covers(held: tuple[Chunk, ...], chunks: tuple[Chunk, ...]) -> bool:
    """Whether ``held`` has all elements of ``chunks``."""
    return all(one.source == 0 for one in route([held], chunks, LENGTH, 0))


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

    def put_back(self, value: int, at: StateId, *, turns: bool) -> None:
        self.kept.put_back(value, at, turns=turns)

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
        column = group.view.column_of(self.rank.member)
        received: dict[Member, Any] = yield group.exchange(self.rank.member, "parameters", (chunks, value), column.members)
        shares = [received[member] for member in column.members]
        values = [one[1] for one in shares]
        found = assembled([one[0] for one in shares], values, (WHOLE,), column.rank_of(self.rank.member))
        mixed = found == POISON and POISON not in values and self.rank.world.flipped
        return hash(tuple(values)) if mixed else found  # one chunk is wrong: the weights are not half written, and not right
