"""Before a rank that hangs is ended, what all ranks do is written down: afterwards nobody can tell any more."""

from __future__ import annotations

from dataclasses import replace

from fleet.machine.state import MachineState
from fleet.protocol.decisions import Doubtful
from fleet.protocol.events import EvidenceWritten, FilesFound, Implausible, Reads
from fleet.protocol.instructions import Inspect
from fleet.protocol.records import DataFiles, DataRead, EvidenceKept


def inspect(machine: MachineState, reason: str, now_s: float) -> None:
    """Have the agents gather evidence of all ranks in the view; they do so before they evict any."""
    ranks = [machine.current(member) for member in (machine.view.members if machine.view else ())]
    nodes = sorted({rank.process.node for rank in ranks if rank is not None})
    if nodes and machine.evidence.wanted(now_s):
        machine.say(Inspect(tuple(nodes), f"hang-{machine.evidence.number}", reason))


def note(machine: MachineState, event: EvidenceWritten | FilesFound | Implausible | Reads, now_s: float) -> None:
    """What the journal should name: the file that holds the evidence, whose loss was not to be believed, or what is trained on."""
    if isinstance(event, Implausible):
        _implausible(machine, event, now_s)
    elif isinstance(event, Reads):
        _reads(machine, event, now_s)
    elif isinstance(event, FilesFound):
        _files(machine, event, now_s)
    else:
        machine.write(EvidenceKept(event.incident, now_s, event.path, event.members, event.reason, event.detail))


def _reads(machine: MachineState, event: Reads, now_s: float) -> None:
    """Once for each history, as its steps may be read otherwise than those that it took back."""
    facts = (event.data_sha256, event.total_steps, event.history)
    read = DataRead(event.samples, event.batch_size, now_s, *facts, event.step, event.order)
    if machine.current(event.member) and data_of(machine.data) != data_of(read):
        machine.data = read
        machine.write(read)


def data_of(read: DataRead | None) -> DataRead | None:
    """What of it is news when it changes."""
    return replace(read, at_s=0.0, step=0) if read is not None else None


def _files(machine: MachineState, event: FilesFound, now_s: float) -> None:
    digested = all(file.digest for file in event.files)
    key = event.data_sha256, event.first
    if machine.current(event.member) and (key not in machine.files or (digested and not machine.files[key])):
        machine.files[key] = digested
        said = (event.data_sha256, event.reader, event.layout, event.window_bytes, event.first, event.total, event.files)
        machine.write(DataFiles(*said, now_s))


def _implausible(machine: MachineState, event: Implausible, now_s: float) -> None:
    """A device that is wrong shows there again and again."""
    where = f"shard {event.shard}, computed by {event.owner}" if event.owner is not None else "no shard by itself"
    doubtful = Doubtful(float(event.state.step), float(event.shard), float(event.owner.slot if event.owner else -1))
    if event.accepted:
        reason = f"step {event.state.step}: {event.why}; it is the model or the data, not the hardware, and counts"
        machine.decide("corruption", "carry_on", reason, doubtful, now_s)
    else:
        reason = f"step {event.state.step}, {where}: {event.why}; all compute the step once more"
        machine.decide("corruption", "recompute", reason, doubtful, now_s)
