"""Simulated ranks that compute shards together: each column of them has the whole state of its coordinate."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.protocol.chunks import WHOLE, Claim, settled
from fleet.protocol.types import Member, StateId, View, columns
from fleet.simulation.clockwork import Steps
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.ranks import SimLayout
from fleet.simulation.sharded import come_to_one


class SimColumnLayout(SimLayout):
    """Like :class:`actors.rank.mesh.layout.ColumnLayout`. A rank has the state of its coordinate: that of another one is of no use to it.

    Here all coordinates have the same values, but a rank spoils one that comes from another column.
    """

    spares_newcomers = False
    _at = StateId(0, 0)

    def resettle(self, view: View) -> Steps:
        rank, group, me = self.rank, self.rank.group, view.rank_of(self.rank.member)
        claims, target = yield from come_to_one(rank, view.members, view.donor, self.claim())
        there = settled(claims, target)
        held = list(columns(view.members).values())
        if not all(any(there[each].state is not None for each in column) for column in held):
            rank.world.note("lost", rank, view.generation)
            rank.protocol.incomplete()
            raise Broken("no member of a column holds its state")
        yield from self._share(group, [view.members[each] for column in held if me in column for each in column], there, view, target)
        rank.world.note("moved", rank, view.generation, target)
        return target

    def claim(self) -> Claim:
        protocol = self.rank.protocol
        at = None if protocol.dirty else protocol.state
        return self.rank.rank_machine.vote.claim(at, (WHOLE,) if at is not None else (), (), complete=True, node=0)

    def _share(self, group: SimGroup, column: Sequence[Member], there: Sequence[Claim], view: View, target: StateId) -> Steps:
        """The first member of the column that holds ``target`` gives it to those that lack it."""
        rank = self.rank
        lacking = [member for member in column if there[view.rank_of(member)].state is None]
        giver = next(member for member in column if member not in lacking)
        if rank.member == giver and lacking:
            yield from rank.point("donating")
            for member in lacking:
                group.send((giver, member), (rank.protocol.coordinate, self.weights))
            yield rank.rng.uniform(0.02, 0.2)
        elif rank.member in lacking:
            rank.protocol.receiving()
            self.reset()
            rank.rank_machine.vote.begin()
            given = yield group.received(rank.member, [(giver, rank.member)])
            coordinate, weights = given[giver, rank.member]
            yield from self.put_in_place(group, target, weights if coordinate == rank.protocol.coordinate else hash(coordinate))

    def put_back(self, value: int, at: StateId, *, turns: bool) -> None:
        super().put_back(value, at, turns=turns)
        self._at = at

    def followed(self) -> None:
        self.rank.world.watch.commit(self.rank, self._at)
