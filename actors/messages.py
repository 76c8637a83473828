"""What travels between node agents and the coordinator, beside events and instructions."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.protocol.codec import Codec
from fleet.protocol.events import Event
from fleet.protocol.instructions import Instruction
from fleet.protocol.operations import Operation
from fleet.protocol.records import Spans
from fleet.protocol.types import Member, ViewDelta


@dataclass(frozen=True, slots=True)
class AgentHello:
    """First frame of a connection. ``boot`` names the host's boot: where it equals the coordinator's, the clocks are one. ``domain`` is the
    node's domain path."""

    node: str
    index: int
    boot: str
    sent_us: int
    unfit: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class AgentWelcome:
    """``sent_us`` comes back as it was, ``clock_us`` is the run's clock: enough to align the agent's.

    On a host of the same boot, ``offset_us`` (run's clock less the monotonic clock) is exact, and is used instead. ``lease_s``: see
    ``fleet.protocol.reach``.
    """

    boot: str
    sent_us: int
    clock_us: int
    offset_us: int
    lease_s: float = 2.0


@dataclass(frozen=True, slots=True)
class AgentDismissed:
    """In place of a welcome: the run has lost this node, and taken it out of Ray. What it has there is to go."""

    reason: str


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
    """To ``order``. ``refused`` says why nothing was done; empty when it was. ``at_s`` is the moment, on the run's clock.

    ``said``: what was applied, as it was measured.
    """

    order: Operation
    refused: str
    at_s: float
    said: str = ""


@dataclass(frozen=True, slots=True)
class SettingWanted:
    """First and only frame of a connection by which a user changes a setting of the run; the text is as it was typed."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class NoticeWanted:
    """In place of ``SettingWanted``: a node will be taken away in ``notice_s``; None: it stays after all. ``node``: its index, or its name
    or the first letters of that."""

    node: str
    notice_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class PauseWanted:
    """In place of ``SettingWanted``: the run is to end in order, as its user, or who acts for that one, wants its machines back."""

    reason: str


Wanted = SettingWanted | NoticeWanted | PauseWanted
"""What a user may ask of a run that goes on; each is answered by ``SettingAnswer``."""


@dataclass(frozen=True, slots=True)
class SettingAnswer:
    """``refused`` says why nothing was changed; empty when it was. ``way_out`` says what can be given instead."""

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


UP = Codec([*Event.__args__, AgentHello, SpanBatch, ViewWanted, Operated, SettingWanted, NoticeWanted, PauseWanted, EvidenceGathered])
DOWN = Codec([*Instruction.__args__, AgentWelcome, AgentDismissed, SpanAck, ViewChange, SettingAnswer])
