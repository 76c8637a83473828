"""Simulated ranks that compute shards together: each column of them has the whole state of its coordinate."""

from __future__ import annotations

from fleet.protocol.chunks import WHOLE, Claim, state_in_column
from fleet.protocol.types import StateId, View
from fleet.simulation.clockwork import Steps
from fleet.simulation.groups import Broken
from fleet.simulation.ranks import SimLayout
from fleet.simulation.sharded import come_to_one


class SimColumnLayout(SimLayout):
    """Like :class:`actors.rank.mesh.layout.ColumnLayout`."""

    _at = StateId(0, 0)

    def resettle(self, view: View) -> Steps:
        rank = self.rank
        claims, target = yield from come_to_one(rank, view.members, view.donor, self.claim())
        met = state_in_column(claims, target, view, view.rank_of(rank.member))
        if met is None:
            rank.world.note("lost", rank, view.generation)
            rank.protocol.incomplete()
            raise Broken("no member of a column holds its state")
        rank.world.note("moved", rank, view.generation, target)
        return met

    def claim(self) -> Claim:
        protocol = self.rank.protocol
        at = None if protocol.dirty else protocol.state
        return self.rank.rank_machine.vote.claim(at, (WHOLE,), (), complete=True, node=0)

    def put_back(self, value: int, at: StateId, *, turns: bool) -> None:
        super().put_back(value, at, turns=turns)
        self._at = at

    def followed(self) -> None:
        self.rank.world.watch.commit(self.rank, self._at)
