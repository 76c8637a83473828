"""Events of checkpoints: ranks tell of their parts, memories of what they hold, the store of a whole one."""

from __future__ import annotations

from fleet.machine.leaving import gather
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import GatherWhy
from fleet.protocol.events import CheckpointDurable, CheckpointFailed, CopiesHeld, PartFailed, PartWritten
from fleet.protocol.levels import level_of
from fleet.protocol.probes import probe


def part_written(machine: MachineState, event: PartWritten, now_s: float) -> None:
    """With the last part the manifest can be put in place."""
    assert machine.view is not None
    machine.say(*machine.checkpoints.of(level_of(event.request)).part(event, machine.view))


def part_failed(machine: MachineState, event: PartFailed, now_s: float) -> None:
    """There is no use in waiting for the other parts."""
    machine.say(*machine.checkpoints.of(level_of(event.request)).part_failed(event, now_s))


def durable(machine: MachineState, event: CheckpointDurable, now_s: float) -> None:
    """A whole one is kept."""
    machine.say(*machine.checkpoints.of(event.level).durable(event, now_s))


def failed(machine: MachineState, event: CheckpointFailed, now_s: float) -> None:
    """It is tried again, or skipped."""
    machine.say(*machine.checkpoints.of(event.level).failed(event.reason, now_s))


def copies_held(machine: MachineState, event: CopiesHeld, now_s: float) -> None:
    """Members of the view that send their copies to a memory that began anew have to hear where it is now."""
    if machine.checkpoints.hold(event, machine.view) and machine.phase == Phase.RUN:
        probe("a memory that kept copies of the view begins anew")
        gather(machine, now_s, GatherWhy.MEMORY, f"the memory of {event.node}, which kept copies, began anew")
