"""Units of simulated ranks whose model is cut into stages: what travels between stages, and what is given again.

Like :class:`actors.rank.mesh.pipe.Pipeline`. An activation stands for the state, the step, the shard and its stage, and for the activation
before it. So a unit that uses one of another state or step makes a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet.protocol.pipelining import Half, UnitHalf, Ways, ways_of
from fleet.protocol.types import StateId, View, stage_of
from fleet.simulation.clockwork import Steps
from fleet.simulation.groups import Broken
from fleet.simulation.model import SPOILED, gradient
from fleet.simulation.ranks import SimRank


def crossing(weights: int, step: int, shard: int, stage: int, half: Half) -> int:
    """A unit's message to the stage after it (FORWARD), or before it: a pure function of the state and of (step, shard)."""
    return hash((weights, step, shard, stage, half, 29))


class SimPipeline:
    """The units of one rank.

    Attributes:
        kept: by half and shard, the messages of this rank's units of the present step.
        ways: of all shards of the present step.
    """

    def __init__(self, rank: SimRank) -> None:
        self.rank, self.world = rank, rank.world
        self.kept: dict[Half, dict[int, int]] = {half: {} for half in Half}
        self.ways: Ways | None = None
        self._view: View | None = None
        self._group: Any = None
        self._attempt = 0
        self._at: StateId | None = None

    @property
    def stage(self) -> int:
        """This rank's."""
        return stage_of(self.rank.protocol.coordinate)

    # ---- a view, a step ------------------------------------------------------------------------------------------------------------------

    def join(self, view: View, held: Sequence[Any], at: StateId) -> None:
        """Compute in ``view``. ``held``: by view rank, the shards whose units it has computed. Gives again what others need."""
        if at != self._at:
            self.forget(at)
        self._view, self._group, self._attempt = view, self.rank.group, 0
        self.ways = ways_of(view, self.rank.member, held, self.world.settings.shards, idle=True)
        place = view.column_of(self.rank.member).rank_of(self.rank.member)
        for shard in sorted(self.ways.stages[self.stage].done[place]):
            for half in Half:
                self._give(half, shard)

    def begin_step(self, at: StateId) -> None:
        """The step that begins at ``at`` has no unit yet: the next one, or the same one again."""
        self.forget(at)
        self._attempt += 1
        if self._view is not None:
            self.ways = ways_of(self._view, self.rank.member, [()] * len(self._view.members), self.world.settings.shards, idle=False)

    def forget(self, at: StateId | None = None) -> None:
        """Drop the messages of a step."""
        self.kept, self._at = {half: {} for half in Half}, at

    # ---- units ---------------------------------------------------------------------------------------------------------------------------

    def compute(self, step: int) -> Steps:
        """Compute this rank's units. Gives why they do not count, if so. It stops early where the loop is wanted."""
        rank, view, ways = self.rank, self._view, self.ways
        assert view is not None and ways is not None, "a rank computes before it is in a view"
        place = view.column_of(rank.member).rank_of(rank.member)
        try:
            for turn in ways.turns(self.stage, place):
                if rank.rank_machine.wanted:
                    return "called away"
                rank.where = (step, turn.shard)
                yield from rank.point("backward" if turn.half else "compute")
                came = yield from self._came(turn)
                yield rank.rng.uniform(*self.world.plan.jitter) * self.world.plan.shard_s / 3
                self._compute(step, turn, came)
        except Broken as lost:
            return str(lost)
        finally:
            rank.where = (step, -1)
        return ""

    def _came(self, turn: UnitHalf) -> Steps:
        """The message that the unit needs from the stage beside it; None at an end of the model. Raises Broken."""
        source = self.stage + (1 if turn.half else -1)
        assert self.ways is not None and self._view is not None
        if not 0 <= source < len(self.ways.stages):
            return None
        rank = self.ways.computing[source].get(turn.shard, self.ways.holding[source].get(turn.shard, -1))
        name = self._name(turn.half, turn.shard, self._view.members[rank], self.rank.member)
        found = yield self._group.received(self.rank.member, [name])
        return found[name]

    def _compute(self, step: int, turn: UnitHalf, came: int | None) -> None:
        """The unit's result, from the state that this rank has now."""
        layout, source = self.rank.layout, self.stage + (1 if turn.half else -1)
        right = came is None or came == crossing(layout.weights, step, turn.shard, source, turn.half)
        self.kept[turn.half][turn.shard] = crossing(layout.weights, step, turn.shard, self.stage, turn.half) + (not right)
        if turn.half is Half.BACKWARD:
            found = gradient(layout.weights, step, turn.shard) + (not right)
            layout.held[turn.shard] = SPOILED if self.rank.spoils else found
            self.rank.spoils = False
            self.world.watch.unit(self.rank, self._view, (self._at, self._attempt), self.stage, turn.shard)
        self._give(turn.half, turn.shard)

    def _give(self, half: Half, shard: int) -> None:
        """Send what a unit has given to the rank that computes the unit beside it, if one does."""
        assert self.ways is not None and self._view is not None
        to = self.stage + (-1 if half else 1)
        rank = self.ways.computing[to].get(shard) if 0 <= to < len(self.ways.stages) else None
        if rank is not None:
            member = self._view.members[rank]
            self._group.send(self._name(half, shard, self.rank.member, member), self.kept[half][shard])

    def _name(self, half: Half, shard: int, source: Any, to: Any) -> tuple[Any, ...]:
        return "unit", self._at, self._attempt, half, shard, source, to
