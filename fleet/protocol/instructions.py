"""Instructions: the only output of ``FleetMachine``. A driver performs them; the simulator performs the same ones.

``event`` is the coordinator's number of the event that led to an instruction; 0: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.protocol.causes import EndWhy, Rule
from fleet.protocol.codec import Codec
from fleet.protocol.facts import FromEvent
from fleet.protocol.operations import Operation
from fleet.protocol.records import EndStatus, Record
from fleet.protocol.types import Coordinate, Member, Part, Process, StateId, View


@dataclass(frozen=True, slots=True)
class Welcome(FromEvent):
    """Answer to ``Joined``: the incarnation under which the process may speak.

    ``coordinate``: its place among the ranks that compute a shard together, for as long as it lives. A spare has none until it is called,
    by a further Welcome.
    """

    slot: int
    token: str
    incarnation: int
    coordinate: Coordinate = ()


@dataclass(frozen=True, slots=True)
class Quiesce(FromEvent):
    """Leave every generation up to ``generation`` now, and report ``Quiesced``.

    ``in_person``: the training loop itself has to answer. Else the rank's listening thread may answer while the loop computes on.
    """

    members: tuple[Member, ...]
    generation: int
    in_person: bool = False


@dataclass(frozen=True, slots=True)
class Publish(FromEvent):
    """Form the new view. All its members are quiesced or fresh."""

    view: View


@dataclass(frozen=True, slots=True)
class Propose(FromEvent):
    """Form the proposed view beside the running steps, and enter it together with all its members at a step boundary.

    ``leaving``: members of the present view that are not in the proposed one. They agree to that boundary, too, and stand by behind it.
    """

    view: View
    leaving: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel(FromEvent):
    """Forget the proposal of ``generation``, unless its members have already entered it."""

    members: tuple[Member, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoint(FromEvent):
    """Write a checkpoint at the next step boundary on which all members agree. ``request`` names its level, and grows within it."""

    members: tuple[Member, ...]
    generation: int
    request: int


@dataclass(frozen=True, slots=True)
class CommitCheckpoint(FromEvent):
    """All parts are written: put the manifest in place, then report ``CheckpointDurable``. ``place``: URL of the memories, "" the store.

    ``guarded``: older checkpoints that stay, no matter how many newer ones there are.
    """

    checkpoint: str
    state: StateId
    parts: tuple[Part, ...]
    meta: str
    blocked_s: float
    requested_at_s: float
    place: str = ""
    guarded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Halt(FromEvent):
    """The run stops: the first step after which all members agree to stop is the last. Wait there, as after the run's last step."""

    members: tuple[Member, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class EndAt(FromEvent):
    """The loop of ``by`` has ended the run after ``state``, for this ``reason``: no rank takes a step from there.

    A rank that holds this state waits there, too, even if its loop has more steps. A loop that goes on from there has a mistake.
    """

    members: tuple[Member, ...]
    state: StateId
    by: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Keep(FromEvent):
    """The run stops, and its ranks did not come to one step in time. Write ``state``, which these members hold, beside their loops.

    Each member writes one part, for as many parts as members, under ``generation``, which no view has. If it cannot, it reports
    ``PartFailed``.
    """

    members: tuple[Member, ...]
    generation: int
    state: StateId
    request: int


@dataclass(frozen=True, slots=True)
class Conclude(FromEvent):
    """All members have committed the last step, and it is kept: run the code behind the loop, then report ``Left``."""

    members: tuple[Member, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class OnceAnswer(FromEvent):
    """Answer to ``OnceWanted`` or ``OnceDone``: do ``key``, or take its result, since a rank has done it.

    ``result`` is None when the member has to do ``key`` itself, else the result as JSON text. ``before``: the result of the same task the
    last time before, for example at an earlier step; empty when there is none.
    """

    members: tuple[Member, ...]
    key: str
    result: str | None
    before: str = ""


@dataclass(frozen=True, slots=True)
class Release(FromEvent):
    """The run is over for these members: return from the train function."""

    members: tuple[Member, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Fence(FromEvent):
    """To a stale process: exit, and touch nothing."""

    slot: int
    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evict(FromEvent):
    """End this process by SIGKILL, and report ``ProcessLost`` once it is confirmed dead."""

    member: Member
    process: Process
    why: Rule


@dataclass(frozen=True, slots=True)
class Inspect(FromEvent):
    """To the agents of these nodes: collect the stacks of their ranks, in bounded time, before any rank is evicted."""

    nodes: tuple[str, ...]
    incident: str
    reason: str


@dataclass(frozen=True, slots=True)
class Write:
    """Append ``record`` to the journal. The driver writes it before it performs any later instruction of the same list."""

    record: Record


@dataclass(frozen=True, slots=True)
class EndRun(FromEvent):
    """To the driver: the run has ended. ``status``, ``reason`` and ``why`` are those of its last record."""

    status: EndStatus
    reason: str
    detail: str = ""
    why: EndWhy = EndWhy.OTHER


Instruction = (
    Welcome | Quiesce | Publish | Propose | Cancel | SaveCheckpoint | CommitCheckpoint | Halt | EndAt | Keep | Conclude | OnceAnswer
    | Release | Fence | Evict | Inspect | Operation | Write | EndRun
)  # fmt: skip
INSTRUCTIONS = Codec(Instruction.__args__)
