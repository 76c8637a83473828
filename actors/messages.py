"""What travels between node agents and the coordinator, beside events and instructions."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.protocol.codec import Codec
from fleet.protocol.events import Event
from fleet.protocol.fault_kinds import Operation
from fleet.protocol.instructions import Instruction
from fleet.protocol.records import Spans
from fleet.protocol.types import Member, ViewDelta


@dataclass(frozen=True, slots=True)
class AgentHello:
    """First frame of a connection. ``boot`` names the host's boot: where it equals the coordinator's, the clocks are one."""

    node: str
    index: int
    boot: str
    sent_us: int
    unfit: str = ""


@dataclass(frozen=True, slots=True)
class AgentWelcome:
    """``sent_us`` comes back as it was, ``clock_us`` is the run's clock: enough to align the agent's.

    On a host of the same boot, ``offset_us`` (run's clock less the monotonic clock) is exact, and is used instead.
    """

    boot: str
    sent_us: int
    clock_us: int
    offset_us: int


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """Rank time for the journal. Kept by the agent and sent again until ``SpanAck`` names its number."""

    number: int
    spans: tuple[Spans, ...]


@dataclass(frozen=True, slots=True)
class SpanAck:
    number: int


@dataclass(frozen=True, slots=True)
class ViewChange:
    """A view as a delta to one that this agent was sent before. ``proposal``: to be formed beside running steps."""

    delta: ViewDelta
    proposal: bool


@dataclass(frozen=True, slots=True)
class ViewWanted:
    """The agent does not have the view that a delta is relative to."""

    generation: int


@dataclass(frozen=True, slots=True)
class Operated:
    """To ``order``. ``refused`` says why nothing was done; empty when it was. ``at_s`` is the moment, on the run's clock."""

    order: Operation
    refused: str
    at_s: float


@dataclass(frozen=True, slots=True)
class SettingWanted:
    """First and only frame of a connection by which a user changes a setting of the run; the text is as it was typed."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class SettingAnswer:
    """``refused`` says why nothing was changed; empty when it was. ``way_out`` says what can be set instead."""

    refused: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank of a run that hangs: where it is, what it does and since when, its last collective, the state of its process, its stacks."""

    member: Member
    where: str
    collective: str
    process: str
    stacks: str


@dataclass(frozen=True, slots=True)
class EvidenceGathered:
    """What one node's agent has found for ``incident``."""

    node: str
    incident: str
    reason: str
    ranks: tuple[RankEvidence, ...]


UP = Codec([*Event.__args__, AgentHello, SpanBatch, ViewWanted, Operated, SettingWanted, EvidenceGathered])
DOWN = Codec([*Instruction.__args__, AgentWelcome, SpanAck, ViewChange, SettingAnswer])
