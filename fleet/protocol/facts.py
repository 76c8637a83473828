"""What a process says of the world, and the journal keeps as it was said: events and records at once.

A sender leaves ``at_s`` and ``event`` alone, where the words of a class do not say else: the coordinator puts them in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fleet.protocol.causes import Cause, ProcessEnded
from fleet.protocol.types import Build, DataFile, Fault, FaultPhase, Member, StateId

SHARED = " x"
"""Between the order of a data set and how many steps take the same samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromEvent:
    """``event`` is the number of the event that an instruction or a record follows from, as the coordinator counted it; 0: none."""

    event: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """``at_s`` and ``event`` are those of all records, see ``fleet.protocol.records``."""

    at_s: float = 0.0
    event: int = field(default=0, compare=False)


Said = TypeVar("Said", bound=Noted)


def noted(fact: Said, now_s: float, **found: Any) -> Said:
    """What the journal keeps of what was said just now: with what is ``found`` of it here in place of what was said."""
    return replace(fact, at_s=now_s, **found)


@dataclass(frozen=True, slots=True)
class ProcessLost(Noted):
    """A process is gone, at ``at_s`` as its agent saw. ``cause`` is one of ``fleet.protocol.causes``; ``step`` and ``shard`` are where it
    was (shard -1: not in a shard).

    The coordinator finds the rest. ``fault`` is the id of the injected fault that explains it, if any. ``generation``: the view it was in,
    or -1.
    """

    member: Member
    cause: Cause
    fault: str | None = None
    generation: int = -1
    step: int = -1
    shard: int = -1
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LossExplained(Noted):
    """How a process ended that was lost before: known once who started it has said it."""

    member: Member
    cause: ProcessEnded


@dataclass(frozen=True, slots=True)
class Measurement(Noted):
    """A figure of the model, such as ``val_loss``, at ``state``. View rank 0 says it after the commit; ``member`` None: it is a mean over
    the shards of several ranks."""

    member: Member | None
    state: StateId
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Usage(Noted):
    """What a rank's process has taken since it began. It is said now and then, and at the end.

    That is the most memory that it has had, on its host and of its GPU, and what it has sent to other ranks for reductions, in bytes. In
    ``exchanges`` of them it was measured how much hid behind the rank's own shards: of ``received_bytes`` those of ``ahead_bytes`` were
    there when it was done computing, which spared it ``hidden_us``. ``fetched_bytes`` of checkpoints were read from the durable store. Its
    GPU has taken ``energy_j`` in ``metered_s`` seconds. All are 0 where it cannot be measured.
    """

    member: Member
    peak_bytes: int
    device_peak_bytes: int
    sent_bytes: int
    exchanges: int = 0
    hidden_us: int = 0
    received_bytes: int = 0
    ahead_bytes: int = 0
    fetched_bytes: int = 0
    energy_j: float = 0.0
    metered_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DataRead(Noted):
    """What the loop body takes its batches from: a data set of so many samples (0: streams), ``batch_size`` of them a step. View rank 0
    says it when it is new to it.

    ``data_sha256`` tells it from others: of files the digest of names and sizes, else of type, length, and first, middle and last sample,
    or of the first samples of streams. Empty where that cannot be told. ``total_steps``: how many steps the loop has. Step ``step`` of
    history ``history`` is the first that was read so. ``order``: ``permuted``, ``windows`` or ``streams``, see ``docs/data.md``; empty
    where nobody knows. ``permuted x2``: two steps, one after the other, take the same samples.
    """

    member: Member
    samples: int
    batch_size: int
    data_sha256: str = ""
    total_steps: int = 0
    history: int = 0
    step: int = 0
    order: str = ""

    @property
    def kind(self) -> str:
        """The order, however many steps take the same samples."""
        return self.order.partition(SHARED)[0]

    @property
    def steps_each(self) -> int:
        """So many steps, one after the other, take the same samples."""
        return int(self.order.partition(SHARED)[2] or 1)


@dataclass(frozen=True, slots=True)
class RunBuilt(Noted):
    """How the ranks have built what they train: said before ``Ready``, kept once, and again when that has changed. What a resume is
    compared with."""

    member: Member
    build: Build


@dataclass(frozen=True, slots=True)
class DataFiles(Noted):
    """Files of the data set ``data_sha256`` of a ``DataRead``, from number ``first`` of ``total`` on. View rank 0 says them beside its
    steps: once when the run begins, and again when their digests are known.

    ``reader`` is the class that reads them. ``layout`` says how samples lie in a file: ``strided``, ``lines``, ``groups``, or ``own``,
    which only the reader knows. ``window_bytes`` is a part of the order of ``groups``.
    """

    member: Member
    data_sha256: str
    reader: str
    layout: str
    window_bytes: int
    first: int
    total: int
    files: tuple[DataFile, ...]


@dataclass(frozen=True, slots=True)
class RefusedLines(Noted):
    """``count`` connections that ``where`` (a node, a rank, or the coordinator) has refused or ended in the last seconds.

    ``listener``: agent, setting, store or memory, or a Unix socket. ``reason`` is one of ``fleet.protocol.proof.Reason``; ``peer`` is where
    the last one came from.
    """

    where: str
    listener: str
    reason: str
    peer: str
    count: int


@dataclass(frozen=True, slots=True)
class FaultRecord(Noted):
    """What became of a fault, at ``at_s`` as the injector says. ``phase``: planned, announced, aimed (which is not kept), executed,
    suppressed or healed. ``members`` are the ranks that it was aimed at."""

    fault: Fault
    phase: FaultPhase
    members: tuple[Member, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EvidenceKept(Noted):
    """What these ranks did before a hanging one was ended: their stacks are in the file ``path`` of the run's folder, ``detail`` has a line
    on each. ``incident`` numbers the hangs of a run."""

    incident: str
    path: str
    members: tuple[Member, ...]
    reason: str
    detail: str
