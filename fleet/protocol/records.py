"""Records of the journal. ``docs/journal.md`` describes the file. ``fleet.ledger`` folds it, and ``fleet.machine`` is rebuilt from it.
``facts.py`` has the records that are events, too.

All ``at_s`` are seconds on the run's clock: the coordinator's monotonic clock, to which agents align theirs. ``event`` is the coordinator's
number of the event that led to a record; 0: none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from fleet.protocol.causes import EndWhy
from fleet.protocol.codec import Codec
from fleet.protocol.decisions import Action, AnyPayload, figures
from fleet.protocol.facts import (
    DataFiles,
    DataRead,
    EvidenceKept,
    FaultRecord,
    FromEvent,
    LossExplained,
    Measurement,
    ProcessLost,
    RefusedLines,
    RunBuilt,
    Usage,
)
from fleet.protocol.levels import STORE
from fleet.protocol.types import Member, Process, StateId, View

VERSION = 3
"""The version of the journal's format."""
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
"""The pattern of a run's name, which is a folder and a part of addresses."""

GRAD_NORM, LEARNING_RATE, TOKENS, FLOPS = "grad_norm", "learning_rate", "tokens_per_step", "flops_per_step"
PEAK = "peak_flop_per_s"
PROGRAM = (GRAD_NORM, LEARNING_RATE, TOKENS, FLOPS, PEAK)
"""Names of measurements beside the loss. The terminal does not show them under these names."""
STEADY = (TOKENS, FLOPS, PEAK)
"""Measurements that are the same in each step. The terminal shows tokens a second and MFU in their place."""
PERMUTED, WINDOWS, STREAMS = "permuted", "windows", "streams"
"""The order of a data set's samples: random; random within windows of row groups, which come in random order; as they come."""
STRIDED, LINES, GROUPS, OWN = "strided", "lines", "groups", "own"
"""The layout of samples in a file."""
COMPUTE, COMM, STRAGGLER, DATA, GARBAGE = "c", "x", "w", "d", "y"
CHECKPOINT, RESTORE, REFORM, INIT, VERIFY, STANDBY, FINISH, OTHER = "k", "r", "f", "i", "v", "s", "e", "o"
COMMIT, ABANDON, HOLD = "K", "A", "H"
GROUP_WAIT = "G"

CATEGORIES = {
    COMPUTE: "compute",
    COMM: "exposed_comm",
    STRAGGLER: "straggler_wait",
    DATA: "data_wait",
    GARBAGE: "garbage_collection",
    "R": "rework",
    CHECKPOINT: "checkpoint_stall",
    RESTORE: "restore",
    "D": "detect",
    REFORM: "reform",
    "P": "provision",
    "M": "maintenance",
    GROUP_WAIT: "group_wait",
    INIT: "init",
    VERIFY: "verify",
    STANDBY: "idle_spare",
    FINISH: "finish",
    OTHER: "other",
}
"""Span code -> ledger category. The ledger assigns ``R``, ``D``, ``P``, ``M`` and ``G``; a rank never records them."""

STEP_CODES = frozenset((COMPUTE, COMM, STRAGGLER, DATA, GARBAGE))
"""Spans that make up a step: goodput once the step is committed, rework when it is abandoned."""


CheckpointPhase = Literal["requested", "durable", "failed", "skipped", "withdrawn"]
OncePhase = Literal["begun", "done"]
EndStatus = Literal["completed", "completed, not saved", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """First record. ``config`` is the JSON text of the run's settings; slots are ``0..world + spares``."""

    version: int
    run: str
    at_s: float
    unix_time_s: float
    world: int
    spares: int
    shards: int
    config: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run goes on under a new coordinator process, in the cluster named ``cluster``.

    With ``gap`` the whole run was down since the record before this one: its ranks died with their cluster. Without ``gap`` the coordinator
    alone was replaced, and ranks trained on meanwhile. ``script_sha256`` is the digest of the script with which the run goes on; empty:
    no script, or not known.
    """

    at_s: float
    unix_time_s: float
    cause: str
    cluster: str = ""
    gap: bool = True
    script_sha256: str = ""


@dataclass(frozen=True, slots=True)
class ProcessUp(FromEvent):
    """The coordinator has granted a process an incarnation of a slot."""

    member: Member
    process: Process
    token: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """Event number ``event`` in short, if it led to a record or an instruction. ``what``: its class. ``member`` or ``node``: its sender.
    ``generation`` and ``step``: those of that rank, -1 when it has none."""

    event: int
    what: str
    at_s: float
    member: Member | None = None
    node: str = ""
    generation: int = -1
    step: int = -1
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ViewPublished(FromEvent):
    """A new view. ``graceful``: members entered it at a step boundary, beside running steps. ``causes``: the losses
    (``slot.incarnation``) that led to it."""

    view: View
    at_s: float
    reason: str
    graceful: bool
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed(FromEvent):
    """Every member of the view has reported ``state`` or a later step. Members report in pulses: two steps can share a record."""

    state: StateId
    at_s: float


@dataclass(frozen=True, slots=True)
class HistoryBegun(FromEvent):
    """History ``history`` starts from ``from_state``: later steps of older histories are rolled back."""

    history: int
    from_state: StateId
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Spans:
    """A rank's time without gaps, from ``start_us`` on: each span has one letter of ``codes`` and one number of ``durations_us``.

    ``COMMIT`` and ``ABANDON`` are marks of zero length that close the step attempt before them. The step number begins with ``step``, and
    grows by one after each COMMIT. ``HOLD`` closes the attempt's wait for its peers, since a peer was lost; the attempt's computed shards
    still count. All spans are of ``generation`` and ``history``. One incarnation's records follow each other without gap or overlap.
    """

    member: Member
    generation: int
    history: int
    step: int
    start_us: int
    durations_us: tuple[int, ...]
    codes: str


@dataclass(frozen=True, slots=True)
class Unobserved:
    """A slot's time that was never reported, since its node or the node's agent was lost before."""

    member: Member
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class DecisionMade(FromEvent):
    """A policy's decision, with its reason in words. ``payload`` has its figures: a dataclass of ``fleet.protocol.decisions``."""

    policy: str
    action: Action
    reason: str
    payload: AnyPayload | None
    at_s: float

    @property
    def fields(self) -> dict[str, float]:
        """The figures, for people."""
        return figures(self.payload)


@dataclass(frozen=True, slots=True)
class CheckpointRecord(FromEvent):
    """A checkpoint came to ``phase``: requested, durable, failed, skipped after several failures, or withdrawn. A withdrawn checkpoint is
    not used, since a wrong rank wrote a part of it.

    ``level``: ``store``, or ``peers`` for copies in the memory of other nodes. ``view_changed``: a change of views was its only failure.
    """

    checkpoint: str
    phase: CheckpointPhase
    state: StateId
    at_s: float
    bytes: int = 0
    blocked_s: float = 0.0
    latency_s: float = 0.0
    detail: str = ""
    level: str = STORE
    view_changed: bool = False


@dataclass(frozen=True, slots=True)
class OnceRecord(FromEvent):
    """A task that one rank does for all, see ``fleet.protocol.once``. ``phase``: begun by ``member``, or done, with ``result`` as JSON
    text."""

    phase: OncePhase
    key: str
    member: Member
    at_s: float
    result: str


COMPLETED: Final = "completed"
UNSAVED: Final = "completed, not saved"
"""The end of a run after its last step, or by its loop: with its final checkpoint, or without it."""
STOPPED: Final = "stopped"
"""The end of a run that was told to stop, in order."""


@dataclass(frozen=True, slots=True)
class RunEnded(FromEvent):
    """Last record. ``digest`` is the SHA-256 over the final training state, empty when the run did not complete.

    ``status``: completed; "completed, not saved", when the final checkpoint could not be kept; stopped; or failed. ``why`` is more exact.
    """

    status: EndStatus
    reason: str
    at_s: float
    digest: str
    detail: str
    why: EndWhy = EndWhy.OTHER


def status_of(why: EndWhy) -> EndStatus:
    """The status of a run that ends for ``why``."""
    match why:
        case EndWhy.ALL_STEPS | EndWhy.LOOP_ENDED:
            return COMPLETED
        case EndWhy.NOT_SAVED:
            return UNSAVED
        case EndWhy.STOPPED | EndWhy.STORE_FAILED | EndWhy.TIME_IS_UP | EndWhy.BUDGET_SPENT | EndWhy.PAUSED | EndWhy.TAKEN_OVER:
            return STOPPED
    return "failed"


Record = (
    RunStarted
    | Resumed
    | ProcessUp
    | ProcessLost
    | LossExplained
    | Received
    | ViewPublished
    | Committed
    | HistoryBegun
    | Spans
    | Unobserved
    | FaultRecord
    | DecisionMade
    | CheckpointRecord
    | Measurement
    | Usage
    | DataRead
    | RunBuilt
    | DataFiles
    | EvidenceKept
    | OnceRecord
    | RefusedLines
    | RunEnded
)
RECORDS = Codec(Record.__args__)


PLAIN: Final = "plain"
"""Key in ``RunStarted.config`` of the arguments of a script that runs without Fleet in it. Other runs do not have the key."""


def configuration(config: str) -> dict[str, Any]:
    """``RunStarted.config`` as a dict; empty where it is no JSON object, since a journal may hold any text there."""
    try:
        found = json.loads(config)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def section(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table ``name`` of :func:`configuration`, or of one of its tables; empty where there is none."""
    found = said.get(name)
    return found if isinstance(found, dict) else {}


def dotted(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted names."""
    if not isinstance(value, Mapping):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= dotted(item, f"{path}.{key}" if path else str(key))
    return found
