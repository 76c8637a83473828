"""Events: the inputs of ``FleetMachine``. Ranks and agents send them in this form.

``facts.py`` has the events that the journal keeps unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet.protocol.causes import Departure, EndWhy, Engaged, NodeCause
from fleet.protocol.codec import LEFT_OUT, Codec
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
from fleet.protocol.types import Coordinate, Copy, Finding, Member, Part, Process, Pulse, StateId


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node agent is up. ``index`` is the node's place among the cluster's nodes, for chaos and placement. ``unfit`` is the finding of the
    node's pre-flight check, empty when the node may join. ``domain``: the node's domain path, "" when it is not known."""

    node: str
    index: int
    unfit: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class NodeLeaves:
    """A node will be taken away at ``until_s`` on the run's clock; ``why``: the source of the notice, for people."""

    node: str
    until_s: float
    why: str


@dataclass(frozen=True, slots=True)
class NodeStays:
    """The notice of ``NodeLeaves`` is withdrawn."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone with all its ranks: its agent's connection closed, or its agent was silent for too long."""

    node: str
    cause: NodeCause
    at_s: float


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """The connection to a node's agent broke. Its ranks may be well. If their peers lose them too, waiting has no use."""

    node: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank process says hello, or says it again to a coordinator that restarted.

    The process draws ``token`` once, so that the coordinator recognises a doubled hello. ``incarnation`` is None until the coordinator has
    granted one. ``store`` is the address of the key-value store that this rank offers for process-group rendezvous. ``coordinate``: see
    ``Welcome``.
    """

    slot: int
    token: str
    process: Process
    store: str
    incarnation: int | None = None
    coordinate: Coordinate = field(default=(), metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has built its model and can be put in a view; it holds no run state yet.

    ``apart``: why it cannot keep a part of a sharded state without a shard to compute. As a spare it then stands by without one.
    """

    member: Member
    apart: str = ""


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The rank has stopped in ``generation`` and waits for a later one.

    ``state`` is the rank's state, None when it never had one. ``dirty`` is set when the state is half written. ``generation`` is the
    greatest that the rank joined or was told to leave. ``why``: the reason that it left; ``detail`` says more, for people. ``testimony``
    is set when the rank left because ranks differ. ``engaged``: the work of its loop meanwhile.
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
    """An agent's report of its node's ranks: where each is, and how long ago it moved and gave a sign of life. Every 0.25 s."""

    node: str
    pulses: tuple[Pulse, ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """User code raised in a rank. The process is about to exit. ``traceback`` has the frames of the user's code alone.

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

    ``halted``: the step is the last one before a stop, and the run has more steps. ``ended``: why a loop has ended the run here; empty: no
    loop has.
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
    """The rank asks whether it may do ``key``, which one rank does for all. Repeated until answered. See ``fleet.protocol.once``."""

    member: Member
    key: str


@dataclass(frozen=True, slots=True)
class OnceDone:
    """The rank has done ``key``; ``result`` is the result as JSON text. Repeated until answered."""

    member: Member
    key: str
    result: str


@dataclass(frozen=True, slots=True)
class Logged:
    """Values that the loop has logged for a committed step, by the shards that the rank computed.

    Attributes:
        weights: by shard; 1 where the loop gives none.
        figures: (name, values by shard). A value is None where the loop logged nothing for the shard.
    """

    member: Member
    state: StateId
    shards: tuple[int, ...]
    weights: tuple[float, ...]
    figures: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class StepsTimed:
    """An agent's report of its ranks' measured times in steps of ``generation``. ``total``: the run's steps, 0 when unknown."""

    node: str
    generation: int
    total: int
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True, slots=True)
class Implausible:
    """A loss or the gradient of a step is no finite number, or far too large, so all ranks compute the step once more. Sent by view rank 0.

    ``shard`` is -1 when every loss is well. ``owner`` is the member that computed the shard, ``why`` a clause. ``accepted``: the step gave
    the same result again, and counts.
    """

    member: Member
    state: StateId
    shard: int
    owner: Member | None
    why: str
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class PartWritten:
    """The rank has written its part of checkpoint ``checkpoint``, for ``request``; the loop was blocked for ``blocked_s``."""

    member: Member
    request: int
    checkpoint: str
    state: StateId
    part: Part
    blocked_s: float
    meta: str = ""


@dataclass(frozen=True, slots=True)
class PartFailed:
    """The rank could not write its part of the checkpoint of ``request``; ``reason`` is a sentence."""

    member: Member
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class OutputDropped:
    """The rank's output is not kept any more, since its file cannot be written; ``reason`` is a clause."""

    member: Member
    dropped_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopiesHeld:
    """All copies of checkpoints in the memory of a node. Sent after each change, and to every new coordinator.

    ``address`` serves the copies; a new address means that the memory began anew. Nodes of one ``domain`` fail together ("": not known).
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
    """The user or the driver wants the run to end in order. With ``error`` the run has failed, and the journal has to record it."""

    reason: str
    error: str = ""
    why: EndWhy = EndWhy.STOPPED


@dataclass(frozen=True, slots=True)
class FloorReached:
    """Chaos stops, since the run keeps less than ``floor`` of its pace: it keeps ``kept``. Both are shares from 0 to 1."""

    kept: float
    floor: float


@dataclass(frozen=True, slots=True)
class RoomMissing:
    """``ranks`` ranks have no place on the cluster, for the reason ``detail``; 0: all have one again."""

    ranks: int
    detail: str


@dataclass(frozen=True, slots=True)
class NodesWanted:
    """``action`` is ``ask``: the run asks its cluster for nodes; ``came``: they are there; or ``withdraw``: the run goes on without them.
    ``ranks`` ranks have no place, or had none for ``waited_s``; ``detail`` says it for people."""

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
    """Time has passed: the machine compares the state with the goal again. A missed tick does no harm."""


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
