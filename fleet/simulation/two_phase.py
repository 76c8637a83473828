"""The checker of sharded optimizer state."""

from __future__ import annotations

from fleet.protocol.chunks import lost, settled
from fleet.protocol.records import Committed, Record, ViewPublished
from fleet.protocol.types import StateId, View
from fleet.simulation.checker import InvariantChecker
from fleet.simulation.ranks import SimRank
from fleet.simulation.sharded import LENGTH
from fleet.simulation.stage import Stage


class TwoPhase(InvariantChecker):
    """5, with sharded state: whoever begins a view is at one step with all its members, and nothing is lost of which one copy lives."""

    name = "two-phase"

    def __init__(self, world: Stage) -> None:
        super().__init__(world)
        self._targets: dict[tuple[int, str], StateId] = {}
        self._history = 0

    def placed(self, rank: SimRank, view: View, guarded: tuple[tuple[int, ...], ...], state: StateId, value: int) -> None:
        """``rank`` has its chunks of ``view``, of which ``guarded`` says by owner who keeps copies."""
        target = self._targets.setdefault((view.generation, view.store), state)
        self.require(state == target, f"{rank} begins generation {view.generation} at {state}, another at {target}")
        right = self.world.chain.weights(state.step)
        self.require(value == right, f"{rank} has chunks of another state than {state} in generation {view.generation}")
        copies = min(self.world.settings.optimizer_copies, len(view.column_of(rank.member).members) - 1)
        for owner, guards in enumerate(guarded):
            few = len(set(guards) - {owner}) < copies
            self.require(not few, f"rank {owner} of generation {view.generation} has {guards} for guards, {copies} are due")

    def record(self, record: Record) -> None:
        """No history is given up of which the members of the view that begins another could hold all."""
        if not isinstance(record, ViewPublished) or record.graceful:
            return
        view, last = record.view, self._history
        self._history = max(last, view.state.history)
        members = [rank for rank in map(self.process, view.members) if rank is not None and rank.protocol.sharded and rank.alive]
        claims = [rank.layout.kept.claim() for rank in members]
        target = max((claim.state for claim in claims if claim.state is not None), default=None)
        if target is None or target.history != last or view.state.history == last or target < self._committed():
            return
        if target.step <= view.state.step:
            return  # nothing is given up: the new history begins where this one is
        gone = lost([claim.chunks for claim in settled(claims, target)], LENGTH)
        self.require(
            bool(gone), f"generation {view.generation} gives up {target}, of which its members {[str(rank) for rank in members]} hold all"
        )

    def _committed(self) -> StateId:
        return max((record.state for record in self.world.journal if isinstance(record, Committed)), default=StateId(0, 0))
