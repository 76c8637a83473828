"""The checker of what flipped bits may do; the other invariants leave out ranks of which the simulator knows that they are corrupt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.protocol.types import Member, StateId, View
from fleet.simulation.checker import InvariantChecker
from fleet.simulation.ranks import SimRank


class Corruption(InvariantChecker):
    """What is wrong in one replica never gets into a sum that is used, nor into what others hold, while another one could tell.

    A rank knows by itself of no flipped bit: it is ``corrupt`` in the simulator's own books.
    """

    name = "corruption"

    def commit(self, rank: SimRank, state: StateId) -> None:
        excused = not self.world.flipped or rank.layout.corrupt  # what went wrong without a flip is for ``Identical``
        right = excused or self.fault_free(rank.layout.weights, state)
        self.require(right, f"{rank}, which is sound, commits {state} from what a corrupt rank has put in")

    def completed(self, view: View, values: Mapping[Member, Any]) -> None:
        state = next(iter(values.values()))[0]
        reported = [value[1] for value in values.values() if value[1] is not None]
        if self.world.flipped and len(reported) == 1 and reported[0] != self.world.chain.weights(state.step):
            self._undecidable(state, alone=len(values) == 1)
        held = {value[1] for value in values.values()}
        unseen = len(values) > 1 and len(held) == 1 and self.world.chain.weights(state.step) not in held  # those who differ will see it
        excused = not self.world.flipped or self.world.excused
        self.require(excused or not unseen, f"all of generation {view.generation} go on from {state} with what is wrong")

    def save(self, rank: SimRank, view: View, request: int, state: StateId) -> None:
        if rank.layout.corrupt and len(view.members) == 1:
            self._undecidable(state, alone=True)

    def _undecidable(self, state: StateId, alone: bool) -> None:
        """No other rank holds ``state``, or says so: those who have just come say nothing in their first step."""
        if alone:
            self.world.excused = True
        else:
            self.world.unseen.add(StateId(state.history, state.step + 1))
