"""Facts that a process reports and the journal keeps unchanged: each class is an event and a record at once.

A sender leaves ``at_s`` and ``event`` at their defaults, unless the class says otherwise. The coordinator sets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fleet.protocol.causes import Cause, ProcessEnded
from fleet.protocol.types import Build, DataFile, Fault, FaultPhase, Member, StateId

SHARED = " x"
"""Stands between the order of a data set and the number of steps that take the same samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromEvent:
    """``event`` is the coordinator's number of the event that led to this instruction or record; 0: none."""

    event: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """``at_s`` and ``event`` are those of all records, see ``fleet.protocol.records``."""

    at_s: float = 0.0
    event: int = field(default=0, compare=False)


Said = TypeVar("Said", bound=Noted)


def noted(fact: Said, now_s: float, **found: Any) -> Said:
    """The journal's record of a fact reported at ``now_s``. The coordinator's own fields ``found`` replace the reported ones."""
    return replace(fact, at_s=now_s, **found)


@dataclass(frozen=True, slots=True)
class ProcessLost(Noted):
    """A process is gone; its agent saw it at ``at_s``. ``cause`` is one of ``fleet.protocol.causes``. ``step`` and ``shard`` are the last
    known ones of the process (shard -1: in no shard).

    The coordinator sets the other fields. ``fault`` is the id of the injected fault that explains the loss, if any. ``generation``: the
    view of the process, or -1.
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
    """The exit status of a process that was lost before. The process that started it reports it later."""

    member: Member
    cause: ProcessEnded


@dataclass(frozen=True, slots=True)
class Measurement(Noted):
    """A figure of the model, such as ``val_loss``, at ``state``. View rank 0 reports it after the commit. ``member`` None: the value is a
    mean over the shards of several ranks."""

    member: Member | None
    state: StateId
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Usage(Noted):
    """The resources that a rank's process has used since it began. The rank reports them now and then, and at the end.

    ``peak_bytes`` and ``device_peak_bytes``: the most memory, on the host and of the GPU. ``sent_bytes``: sent to other ranks for
    reductions. ``exchanges``: the reductions that were measured. In them the rank got ``received_bytes``; ``ahead_bytes`` of these had come
    before the rank had computed its own shards, which saved ``hidden_us``. ``fetched_bytes``: read from checkpoints in the durable store.
    The GPU used ``energy_j`` in ``metered_s`` seconds. A value is 0 where it cannot be measured.
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
    """The loop body takes its batches from a data set of ``samples`` samples (0: streams), ``batch_size`` of them a step. View rank 0
    reports a data set when it first reads it.

    ``data_sha256`` identifies the data set. For files it is the digest of names and sizes. For streams it is that of the first samples.
    Else it is that of type, length, and first, middle and last sample. It is empty where Fleet cannot compute it. ``total_steps``: the
    number of steps of the loop. ``step`` of ``history`` is the first step with this data. ``order``: ``permuted``, ``windows`` or
    ``streams``, see ``docs/data.md``; empty: not known. ``permuted x2``: two steps in a row take the same samples.
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
        """The order alone, without the number of steps that take the same samples."""
        return self.order.partition(SHARED)[0]

    @property
    def steps_each(self) -> int:
        """The number of steps in a row that take the same samples."""
        return int(self.order.partition(SHARED)[2] or 1)


@dataclass(frozen=True, slots=True)
class RunBuilt(Noted):
    """The ranks' build of model and optimizer. Each rank reports it before ``Ready``; the journal keeps it once, and again after a change.
    A resume is compared with it."""

    member: Member
    build: Build


@dataclass(frozen=True, slots=True)
class DataFiles(Noted):
    """Files of the data set ``data_sha256`` of a ``DataRead``, from number ``first`` of ``total`` on. View rank 0 reports them beside its
    steps: once when the run begins, and again when their digests are known.

    ``reader`` is the class that reads them. ``layout`` says how samples lie in a file: ``strided``, ``lines``, ``groups``, or ``own``:
    known to the reader alone. ``window_bytes`` is a part of the order of ``groups``.
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

    ``listener``: agent, setting, store or memory, or a Unix socket. ``reason`` is one of ``fleet.protocol.proof.Reason``. ``peer`` is the
    origin of the last connection.
    """

    where: str
    listener: str
    reason: str
    peer: str
    count: int


@dataclass(frozen=True, slots=True)
class FaultRecord(Noted):
    """A fault came to ``phase`` at ``at_s``, as the injector reports: planned, announced, aimed (which is not kept), executed, suppressed
    or healed. ``members`` are the targeted ranks."""

    fault: Fault
    phase: FaultPhase
    members: tuple[Member, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EvidenceKept(Noted):
    """The stacks of ``members``, taken before a hanging rank was ended, are in the file ``path`` of the run's folder. ``detail`` has a line
    on each member. ``incident`` numbers the hangs of a run."""

    incident: str
    path: str
    members: tuple[Member, ...]
    reason: str
    detail: str
