"""What can happen to a run: the inputs of ``FleetMachine``. Ranks and agents send these over the wire as they stand.

What the journal keeps as it was said is in ``facts.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.protocol.causes import Departure, EndWhy, Engaged, NodeCause
from fleet.protocol.codec import Codec
from fleet.protocol.decisions import AskAction
from fleet.protocol.facts import (
    DataFiles,
    DataRead,
    EvidenceKept,
    FaultRecord,
    LossExplained,
    Measurement,
    ProcessLost,
    RefusedLines,
    RunBuilt,
    Usage,
)
from fleet.protocol.levels import STORE
from fleet.protocol.slowness import RankTimes
from fleet.protocol.types import Copy, Finding, Member, Part, Process, Pulse, StateId


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node agent is up. ``index`` is the node's place among the cluster's nodes, for chaos and placement. ``unfit`` says what its
    pre-flight check has found, empty when it may join. ``domain``: its domain path, "" when it is not known."""

    node: str
    index: int
    unfit: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class NodeLeaves:
    """A node will be taken away at ``until_s`` on the run's clock; ``why``: who says so, for people."""

    node: str
    until_s: float
    why: str


@dataclass(frozen=True, slots=True)
class NodeStays:
    """The notice of ``NodeLeaves`` is withdrawn."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone with all its ranks: its agent's connection closed, or it was silent for too long."""

    node: str
    cause: NodeCause
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """The connection to a node's agent broke. Its ranks may be well; but if their peers lose them too, there is no use in waiting."""

    node: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank process says hello, or says it again to a coordinator that restarted.

    ``token`` is drawn by the process once, so that a doubled hello is recognised. ``incarnation`` is None until it was granted one.
    ``store`` is the address of the key-value store that this rank offers for process-group rendezvous.
    """

    slot: int
    token: str
    process: Process
    store: str
    incarnation: int | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has built its model and can be put in a view; it holds no run state yet."""

    member: Member


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The rank has stopped in ``generation`` and waits for a later one.

    ``state`` is what it holds, None when it never had any. ``dirty`` is set when the state is half written.
    ``generation`` is the greatest that it joined or was told to leave. ``why`` it is in none; ``detail`` says more, for people.
    ``testimony`` is there when it left because ranks differ in what should be alike. ``engaged``: what its loop does meanwhile.
    """

    member: Member
    generation: int
    state: StateId | None
    dirty: bool
    why: Departure
    detail: str = ""
    testimony: Finding | None = None
    engaged: Engaged = Engaged.WAITS


@dataclass(frozen=True, slots=True)
class Formed:
    """The rank is in the process group of ``generation``, holds ``state`` and steps."""

    member: Member
    generation: int
    state: StateId


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One node's ranks, aggregated by its agent: where each is, and how long ago it moved and gave a sign of life. Every 0.25 s."""

    node: str
    pulses: tuple[Pulse, ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """User code raised in a rank. The process is about to exit; ``traceback`` is the user's own part of it.

    ``mistake``: Fleet knows that any other process would raise, too.
    """

    member: Member
    step: int
    shard: int
    error: str
    traceback: str
    mistake: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The rank has committed the run's last step and waits at the finish barrier. ``concluded``: it was told to go on behind the loop.

    ``halted``: it is the last step before a stop, and more were to follow. ``ended``: why a loop has ended the run here; empty: none has.
    """

    member: Member
    generation: int
    state: StateId
    digest: str
    concluded: bool = False
    halted: bool = False
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """The train function has returned after the last step; the process waits to be released. State and digest are those of ``Finished``."""

    member: Member
    generation: int
    state: StateId
    digest: str


@dataclass(frozen=True, slots=True)
class OnceWanted:
    """The rank has come to ``key``, which is done once: may it do it, or is it done? See ``fleet.protocol.once``. Repeated meanwhile."""

    member: Member
    key: str


@dataclass(frozen=True, slots=True)
class OnceDone:
    """The rank has done ``key``; ``result`` is what came of it, as JSON text. Repeated until it is answered."""

    member: Member
    key: str
    result: str


@dataclass(frozen=True, slots=True)
class Logged:
    """What the loop has logged of a committed step, by the shards that the rank computed of it.

    Attributes:
        weights: by shard; 1 where the loop gives none.
        figures: (name, value by shard) of each. None where nothing was logged for a shard.
    """

    member: Member
    state: StateId
    shards: tuple[int, ...]
    weights: tuple[float, ...]
    figures: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class StepsTimed:
    """What the ranks of one node measured in steps of ``generation``, gathered by its agent. ``total``: the run's steps, 0 when unknown."""

    node: str
    generation: int
    total: int
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class Implausible:
    """A loss or the gradient of a step is no finite number, or far too large, so all ranks compute the step once more. Sent by view rank 0.

    ``shard`` is -1 when every loss is well; ``owner`` is who computed that shard, ``why`` a clause. ``accepted``: it came out the same
    again, and counts.
    """

    member: Member
    state: StateId
    shard: int
    owner: Member | None
    why: str
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class PartWritten:
    """The rank has written its part of checkpoint ``checkpoint``, as ``request`` asked; the loop was blocked for ``blocked_s``."""

    member: Member
    request: int
    checkpoint: str
    state: StateId
    part: Part
    blocked_s: float
    meta: str = ""


@dataclass(frozen=True, slots=True)
class PartFailed:
    """The rank could not write its part of what ``request`` asked for; ``reason`` is a sentence."""

    member: Member
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class OutputDropped:
    """What the rank has printed is not kept any more, since its file cannot be written; ``reason`` is a clause."""

    member: Member
    dropped_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopiesHeld:
    """All that the memory of a node holds of checkpoints, whenever that has changed, and to every coordinator that is new.

    ``address`` is where it is served; another one says that it began anew. Nodes of one ``domain`` fail together ("": not known).
    """

    node: str
    address: str
    domain: str
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class CheckpointDurable:
    """The manifest of a checkpoint is committed; it took ``latency_s`` from the request."""

    checkpoint: str
    state: StateId
    bytes: int
    blocked_s: float
    latency_s: float
    level: str = STORE


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint will not become durable; ``reason`` is a sentence."""

    checkpoint: str
    reason: str
    level: str = STORE


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user or the driver wants the run to end in order; with ``error`` it has failed already, and only the word is missing."""

    reason: str
    error: str = ""
    why: EndWhy = EndWhy.STOPPED


@dataclass(frozen=True, slots=True)
class FloorReached:
    """Chaos has cost too much and stops: so little is ``kept`` of the run's pace, of at least ``floor``; both are shares from 0 to 1."""

    kept: float
    floor: float


@dataclass(frozen=True, slots=True)
class RoomMissing:
    """So many ranks have no place on the cluster, and why; 0: all have one again."""

    ranks: int
    detail: str


@dataclass(frozen=True, slots=True)
class NodesWanted:
    """The run asks its cluster for nodes: ``ask``; they ``came``; or it does without, ``withdraw``. ``ranks`` have no place, or had none
    for ``waited_s``; ``detail`` says it for people."""

    action: AskAction
    ranks: int
    detail: str
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class SettingChanged:
    """The user changes a setting of the running run; on and off are 1 and 0. See ``fleet.settings.live``."""

    key: str
    value: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: what is gets compared again with what should be. A missed tick does no harm."""


Event = (
    NodeJoined
    | NodeLeaves
    | NodeStays
    | NodeLost
    | NodeSilent
    | Joined
    | Ready
    | Quiesced
    | Formed
    | Heartbeat
    | ProcessLost
    | LossExplained
    | Raised
    | Finished
    | Left
    | OnceWanted
    | OnceDone
    | Measurement
    | Logged
    | Usage
    | DataRead
    | RunBuilt
    | DataFiles
    | RefusedLines
    | StepsTimed
    | Implausible
    | PartWritten
    | PartFailed
    | OutputDropped
    | CopiesHeld
    | CheckpointDurable
    | CheckpointFailed
    | FaultRecord
    | EvidenceKept
    | StopRequested
    | RoomMissing
    | NodesWanted
    | FloorReached
    | SettingChanged
    | Tick
)
EVENTS = Codec(Event.__args__)
