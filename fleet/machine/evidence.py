"""Before a rank that hangs is ended, what all ranks do is written down: afterwards nobody can tell any more."""

from __future__ import annotations

from fleet.machine.state import MachineState
from fleet.protocol.instructions import Inspect


def inspect(machine: MachineState, reason: str, now_s: float) -> None:
    """Have the agents gather evidence of all ranks in the view; they do so before they evict any."""
    ranks = [machine.current(member) for member in (machine.view.members if machine.view else ())]
    nodes = sorted({rank.process.node for rank in ranks if rank is not None})
    hangs = machine.liveness.hangs
    if nodes and hangs.wanted(now_s):
        machine.say(Inspect(tuple(nodes), f"hang-{hangs.number}", reason))
