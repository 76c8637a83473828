"""The world is to have another size, on purpose. A larger one grows at a step boundary, as after a loss: see ``proposals.py``.

To a smaller one all leave the view together, and it forms again without some, who stand by from then on: nobody is lost, and no step. What
was computed of the step at hand is computed again. Where each rank holds a part of the optimizer's state, no more go at a time than there
are copies of each part.
"""

from __future__ import annotations

from fleet.machine import departures
from fleet.machine.leaving import gather
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import GatherWhy
from fleet.protocol.types import View


def tick(machine: MachineState, view: View, now_s: float) -> None:
    """While a view runs: if it was made larger than the world is to be now, all leave it; once what is being saved is saved."""
    if not machine.growth.resized or machine.phase != Phase.RUN or machine.checkpoints.pending:
        return
    wanted = departures.wanted(machine, view)
    machine.growth.resized = len(view.members) > wanted
    if machine.growth.resized:
        gather(machine, now_s, GatherWhy.RESIZED, f"the world is to have {wanted} ranks, and {len(view.members)} train")
