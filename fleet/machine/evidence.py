"""Before a rank that hangs is ended, what all ranks do is written down: afterwards nobody can tell any more."""

from __future__ import annotations

from fleet.machine.state import MachineState
from fleet.protocol.decisions import Doubtful
from fleet.protocol.events import EvidenceWritten, Implausible, Reads
from fleet.protocol.instructions import Inspect
from fleet.protocol.records import DataRead, EvidenceKept


def inspect(machine: MachineState, reason: str, now_s: float) -> None:
    """Have the agents gather evidence of all ranks in the view; they do so before they evict any."""
    ranks = [machine.current(member) for member in (machine.view.members if machine.view else ())]
    nodes = sorted({rank.process.node for rank in ranks if rank is not None})
    if nodes and machine.evidence.wanted(now_s):
        machine.say(Inspect(tuple(nodes), f"hang-{machine.evidence.number}", reason))


def note(machine: MachineState, event: EvidenceWritten | Implausible | Reads, now_s: float) -> None:
    """What the journal should name: the file that holds the evidence, whose loss was not to be believed, or what is trained on."""
    if isinstance(event, Implausible):
        _implausible(machine, event, now_s)
    elif isinstance(event, Reads):
        data = event.samples, event.batch_size, event.data_sha256, event.total_steps
        if machine.current(event.member) and machine.data != data:
            machine.data = data
            machine.write(DataRead(event.samples, event.batch_size, now_s, event.data_sha256, event.total_steps))
    else:
        machine.write(EvidenceKept(event.incident, now_s, event.path, event.members, event.reason, event.detail))


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
