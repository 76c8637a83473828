"""Events that are journalled with few changes, and events of checkpoints: they do not change the place of any rank."""

from __future__ import annotations

from fleet.ledger import pace
from fleet.machine.leaving import gather
from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Figures
from fleet.protocol.events import (
    CheckpointDurable,
    CheckpointFailed,
    CopiesHeld,
    FloorReached,
    Implausible,
    Logged,
    NodesWanted,
    OnceDone,
    OnceWanted,
    OutputDropped,
    PartFailed,
    PartWritten,
    RoomMissing,
    StepsTimed,
)
from fleet.protocol.facts import DataFiles, DataRead, EvidenceKept, Measurement, RefusedLines, Usage, noted
from fleet.protocol.levels import level_of
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade


def keep(machine: MachineState, event: EvidenceKept | Measurement | RefusedLines | Usage, now_s: float) -> None:
    """Journal the event unchanged."""
    machine.write(noted(event, now_s))


def logged(machine: MachineState, event: Logged, now_s: float) -> None:
    """Journal the mean of each figure over all shards, once all shards of a step are there."""
    for name, value in machine.trained.figures.receive(event):
        machine.write(Measurement(None, event.state, name, value, at_s=now_s))


def data_read(machine: MachineState, event: DataRead, now_s: float) -> None:
    """Journal it once for each history, since the steps of a new history may read other data."""
    record = noted(event, now_s)
    if machine.trained.note_data(record):
        machine.write(record)


def data_files(machine: MachineState, event: DataFiles, now_s: float) -> None:
    """Journal them once, and again when their digests are known."""
    if machine.trained.note_files(event):
        machine.write(noted(event, now_s))


def implausible(machine: MachineState, event: Implausible, now_s: float) -> None:
    """Journal the implausible shard: a wrong device shows there again and again."""
    where = f"shard {event.shard}, computed by {event.owner}" if event.owner is not None else "no shard by itself"
    slot = event.owner.slot if event.owner else -1
    doubtful = Figures({"step": float(event.state.step), "shard": float(event.shard), "slot": float(slot)})
    if event.accepted:
        reason = f"step {event.state.step}: {event.why}; it is the model or the data, not the hardware, and counts"
        machine.decide("corruption", "carry_on", reason, doubtful, now_s)
    else:
        reason = f"step {event.state.step}, {where}: {event.why}; all compute the step once more"
        machine.decide("corruption", "recompute", reason, doubtful, now_s)


def steps_timed(machine: MachineState, event: StepsTimed, now_s: float) -> None:
    """Keep the times for the straggler policy, which is asked while a view runs."""
    machine.stragglers.take(event, machine.view, now_s)


def output_dropped(machine: MachineState, event: OutputDropped, now_s: float) -> None:
    """Warn that a rank's output file cannot be written."""
    message = f"{event.dropped_bytes:,} bytes that rank {event.member} has printed are not kept: {event.reason}"
    machine.write(DecisionMade("output", "warn", message, None, now_s))


def room_missing(machine: MachineState, event: RoomMissing, now_s: float) -> None:
    """Journal that ranks have no place on the cluster, or that all have one again."""
    missing = Figures({"ranks": float(event.ranks)})
    machine.write(DecisionMade("room", "warn" if event.ranks else "recovered", event.detail, missing, now_s))


def nodes_wanted(machine: MachineState, event: NodesWanted, now_s: float) -> None:
    """Journal the run's request for nodes."""
    waited = {} if event.waited_s is None else {"waited_s": event.waited_s}
    machine.write(DecisionMade("nodes", event.action, event.detail, Figures({"ranks": float(event.ranks), **waited}), now_s))


def floor_reached(machine: MachineState, event: FloorReached, now_s: float) -> None:
    """Journal that chaos stops."""
    machine.write(pace.stops(event, now_s))


def once_wanted(machine: MachineState, event: OnceWanted, now_s: float) -> None:
    """A rank asks for a task that one rank does for all."""
    machine.say(*machine.once.ask(event.member, event.key, lambda other: machine.current(other) is not None, now_s))


def once_done(machine: MachineState, event: OnceDone, now_s: float) -> None:
    """A rank has done such a task."""
    machine.say(*machine.once.done(event.member, event.key, event.result, now_s))


def part_written(machine: MachineState, event: PartWritten, now_s: float) -> None:
    """A part is written. After the last part the manifest can be put in place."""
    assert machine.view is not None
    machine.say(*machine.checkpoints.of(level_of(event.request)).part(event, machine.view))


def part_failed(machine: MachineState, event: PartFailed, now_s: float) -> None:
    """A part could not be written: the checkpoint has failed."""
    machine.say(*machine.checkpoints.of(level_of(event.request)).part_failed(event, now_s))


def durable(machine: MachineState, event: CheckpointDurable, now_s: float) -> None:
    """A whole checkpoint is kept."""
    machine.say(*machine.checkpoints.of(event.level).durable(event, now_s))


def failed(machine: MachineState, event: CheckpointFailed, now_s: float) -> None:
    """A checkpoint failed: it is tried again, or skipped."""
    machine.say(*machine.checkpoints.of(event.level).failed(event.reason, now_s))


def copies_held(machine: MachineState, event: CopiesHeld, now_s: float) -> None:
    """Note a node's copies. If its memory began anew, members that send copies there have to learn its new address in a new view."""
    if machine.checkpoints.hold(event, machine.view) and machine.phase == Phase.RUN:
        probe("a memory that kept copies of the view begins anew")
        gather(machine, now_s, GatherWhy.MEMORY, f"the memory of {event.node}, which kept copies, began anew")
