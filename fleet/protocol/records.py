"""What the journal holds. ``docs/journal.md`` describes the file; ``goodput.py`` folds it; ``machine.py`` is rebuilt from it.
Facts that are kept as they were said are in ``facts.py``.

All ``at_s`` are seconds on the run's clock: the coordinator's monotonic clock, to which agents align theirs. ``event`` is the number of the
event that a record follows from, as the coordinator counted it; 0: none.
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
"""Of the format that is written and read."""
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
"""What a run may be called: it is a folder, and a part of addresses."""

GRAD_NORM, LEARNING_RATE, TOKENS, FLOPS = "grad_norm", "learning_rate", "tokens_per_step", "flops_per_step"
PEAK = "peak_flop_per_s"
PROGRAM = (GRAD_NORM, LEARNING_RATE, TOKENS, FLOPS, PEAK)
"""Names of measurements that a run has beside its loss, and that no line of the terminal shows as they are."""
STEADY = (TOKENS, FLOPS, PEAK)
"""The same in each step: what comes of them is shown, tokens a second and MFU, and not they."""
PERMUTED, WINDOWS, STREAMS = "permuted", "windows", "streams"
"""In which order a data set gives its samples: random; random within windows of row groups, which come in random order; as they come."""
STRIDED, LINES, GROUPS, OWN = "strided", "lines", "groups", "own"
"""How the samples of a file lie in it."""
COMPUTE, COMM, STRAGGLER, DATA = "c", "x", "w", "d"
CHECKPOINT, RESTORE, REFORM, INIT, VERIFY, STANDBY, FINISH, OTHER = "k", "r", "f", "i", "v", "s", "e", "o"
COMMIT, ABANDON, HOLD = "K", "A", "H"

CATEGORIES = {
    COMPUTE: "compute",
    COMM: "exposed_comm",
    STRAGGLER: "straggler_wait",
    DATA: "data_wait",
    "R": "rework",
    CHECKPOINT: "checkpoint_stall",
    RESTORE: "restore",
    "D": "detect",
    REFORM: "reform",
    "P": "provision",
    "M": "maintenance",
    INIT: "init",
    VERIFY: "verify",
    STANDBY: "idle_spare",
    FINISH: "finish",
    OTHER: "other",
}
"""Span code -> ledger category. ``R``, ``D``, ``P`` and ``M`` are never recorded by a rank: the ledger assigns them."""

STEP_CODES = frozenset((COMPUTE, COMM, STRAGGLER, DATA))
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
    """The run goes on under a new coordinator process. ``cluster`` names the cluster that it goes on in.

    With ``gap`` the whole run was down from the last record before this one: its ranks died with their cluster. Without, only the
    coordinator was replaced, and ranks trained on meanwhile. ``script_sha256`` is that of the script it goes on with; empty: there is none,
    or nobody knows.
    """

    at_s: float
    unix_time_s: float
    cause: str
    cluster: str = ""
    gap: bool = True
    script_sha256: str = ""


@dataclass(frozen=True, slots=True)
class ProcessUp(FromEvent):
    """A process was granted an incarnation of a slot."""

    member: Member
    process: Process
    token: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """Event number ``event`` in short, where it led to something. ``what``: its class. ``member`` or ``node``: whose it is. ``generation``
    and ``step``: where that rank stands, -1 when nowhere."""

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
    """``graceful``: entered at a step boundary, beside running steps. ``causes``: the losses (``slot.incarnation``) that led to it."""

    view: View
    at_s: float
    reason: str
    graceful: bool
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed(FromEvent):
    """Every member of the view has reported ``state``."""

    state: StateId
    at_s: float


@dataclass(frozen=True, slots=True)
class HistoryBegun(FromEvent):
    """History ``history`` starts from ``from_state``: what an older history did after that step is rolled back."""

    history: int
    from_state: StateId
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Spans:
    """A rank's time, gapless, from ``start_us`` on: one letter of ``codes`` and one of ``durations_us`` a span.

    ``COMMIT`` and ``ABANDON`` are marks of zero length that close the step attempt before them; the step number goes up by one after each
    COMMIT, from ``step`` at the start. ``HOLD`` closes what the attempt has waited for its peers so far, as a peer was lost; what it has
    computed goes on to count. All of it happened in ``generation`` and ``history``. One incarnation's records follow each other without
    gap or overlap.
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
    """A slot's time that died with its node, or with the node's agent, before it could be reported."""

    member: Member
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class DecisionMade(FromEvent):
    """A policy's decision, with its reason in words, and what it was decided on: one of the dataclasses of ``fleet.protocol.decisions``."""

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
    """``phase``: requested, durable, failed, skipped after several failures, or withdrawn: a rank that was found to be wrong had a part in
    it, so it is not used.

    ``level``: ``store``, or ``peers`` for copies in the memory of other nodes. ``view_changed``: it failed for that alone.
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
    """What is done once in the run, see ``fleet.protocol.once``. ``phase``: begun by ``member``, or done, with ``result`` as JSON text."""

    phase: OncePhase
    key: str
    member: Member
    at_s: float
    result: str


COMPLETED: Final = "completed"
UNSAVED: Final = "completed, not saved"
"""How a run ends that has come to its last step, or was ended by its loop: with its final checkpoint, or without."""
STOPPED: Final = "stopped"
"""How a run ends that was told to, in order."""


@dataclass(frozen=True, slots=True)
class RunEnded(FromEvent):
    """Last record. ``digest`` is the SHA-256 over the final training state, empty when the run did not complete.

    ``status``: completed; "completed, not saved", when the final checkpoint could not be kept; stopped; or failed. ``why`` says it in more
    detail.
    """

    status: EndStatus
    reason: str
    at_s: float
    digest: str
    detail: str
    why: EndWhy = EndWhy.OTHER


def status_of(why: EndWhy) -> EndStatus:
    """How a run ends for that."""
    match why:
        case EndWhy.ALL_STEPS | EndWhy.LOOP_ENDED:
            return COMPLETED
        case EndWhy.NOT_SAVED:
            return UNSAVED
        case EndWhy.STOPPED | EndWhy.STORE_FAILED | EndWhy.TIME_IS_UP | EndWhy.BUDGET_SPENT | EndWhy.PAUSED:
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
"""In ``RunStarted.config``: the arguments of a script that is not Fleet's, and is run as it is. Absent of all others."""


def configuration(config: str) -> dict[str, Any]:
    """What ``RunStarted.config`` says; empty where that is no JSON object, as a journal may hold any text there."""
    try:
        found = json.loads(config)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def section(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of what :func:`configuration` has found, or of a table of it; empty where there is none."""
    found = said.get(name)
    return found if isinstance(found, dict) else {}


def dotted(value: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    if not isinstance(value, Mapping):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= dotted(item, f"{path}.{key}" if path else str(key))
    return found
