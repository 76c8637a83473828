"""What ``FleetMachine`` wants done: its only output. A driver performs them; the simulator performs the same ones.

``event`` is the number of the event that an instruction follows from, as the coordinator counted it; 0: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.protocol.causes import EndWhy, Rule
from fleet.protocol.codec import Codec
from fleet.protocol.facts import FromEvent
from fleet.protocol.operations import Operation
from fleet.protocol.records import EndStatus, Record
from fleet.protocol.types import Member, Part, Process, StateId, View


@dataclass(frozen=True, slots=True)
class Welcome(FromEvent):
    """Answer to ``Joined``: the incarnation under which the process may speak."""

    slot: int
    token: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Quiesce(FromEvent):
    """Leave every generation up to ``generation`` now, and report ``Quiesced``.

    ``in_person``: the training loop itself has to answer; else whoever listens may do so while the loop computes, without stopping it.
    """

    members: tuple[Member, ...]
    generation: int
    in_person: bool = False


@dataclass(frozen=True, slots=True)
class Publish(FromEvent):
    """A new view to its members, all of which are quiesced or fresh."""

    view: View


@dataclass(frozen=True, slots=True)
class Propose(FromEvent):
    """A view that its members form beside the running steps and enter together at a step boundary."""

    view: View


@dataclass(frozen=True, slots=True)
class Cancel(FromEvent):
    """Forget the proposal of ``generation``, unless it was entered already."""

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

    ``guarded``: older checkpoints that stay, however many newer ones there are.
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
    """The run is told to stop: the next step after which all members agree on it is the last. Wait there, as after the run's last step."""

    members: tuple[Member, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class EndAt(FromEvent):
    """The loop of ``by`` has ended the run behind ``state``, for this ``reason``: no rank takes a step from there.

    A rank that has come to this state without taking its last step waits there, too. One whose loop goes on from it has a mistake.
    """

    members: tuple[Member, ...]
    state: StateId
    by: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Keep(FromEvent):
    """The run stops, and its ranks did not come to one step in time: write ``state``, which these members hold, whatever their loops do.

    Each writes one part of as many as there are members, under ``generation``, that of no view. If it cannot, it reports ``PartFailed``.
    """

    members: tuple[Member, ...]
    generation: int
    state: StateId
    request: int


@dataclass(frozen=True, slots=True)
class Conclude(FromEvent):
    """The last step is committed by all, and kept: run the code behind the loop, then report ``Left``."""

    members: tuple[Member, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class OnceAnswer(FromEvent):
    """To ``OnceWanted`` or ``OnceDone``: do it, or it is done, and this came of it.

    ``result`` is None when the member is to do ``key`` itself, else what came of it, as JSON text. ``before``: what came of the same thing
    the last time before, for example at an earlier step; empty when there is none.
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
    """A stale process: it must exit and touch nothing."""

    slot: int
    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evict(FromEvent):
    """SIGKILL this process, and report ``ProcessLost`` when it is confirmed dead."""

    member: Member
    process: Process
    why: Rule


@dataclass(frozen=True, slots=True)
class Inspect(FromEvent):
    """To the agents of these nodes: gather evidence of what their ranks do, within a bound, and before any is evicted."""

    nodes: tuple[str, ...]
    incident: str
    reason: str


@dataclass(frozen=True, slots=True)
class Write:
    """Append to the journal. Written before any instruction that follows it in the same list is performed."""

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
