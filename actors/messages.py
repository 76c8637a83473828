"""Messages between node agents and the coordinator, besides events and instructions."""

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
    """First frame of a connection. ``boot`` names the host's boot: if it equals the coordinator's, both have the same clock. ``domain`` is
    the
    node's domain path."""

    node: str
    index: int
    boot: str
    sent_us: int
    unfit: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class AgentWelcome:
    """The answer to a hello. ``sent_us`` is that of the hello, ``clock_us`` is the run's clock: the agent aligns its clock with them.

    On a host of the same boot the agent uses ``offset_us`` (run's clock less the monotonic clock), which is exact. ``lease_s``: see
    ``fleet.protocol.reach``.
    """

    boot: str
    sent_us: int
    clock_us: int
    offset_us: int
    lease_s: float = 2.0


@dataclass(frozen=True, slots=True)
class AgentDismissed:
    """In place of a welcome: the run has lost this node, and taken it out of Ray. The node's ranks and files have to go."""

    reason: str


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """Rank time for the journal. The agent keeps it and sends it again until ``SpanAck`` names its number."""

    number: int
    spans: tuple[Spans, ...]


@dataclass(frozen=True, slots=True)
class SpanAck:
    number: int


@dataclass(frozen=True, slots=True)
class ViewChange:
    """A view as a delta to one that was sent to this agent before. ``leaving``: see :class:`Propose`; None: the view is published."""

    delta: ViewDelta
    leaving: tuple[Member, ...] | None = None


@dataclass(frozen=True, slots=True)
class ViewWanted:
    """The agent lacks the base of a delta, and asks for the whole view."""

    generation: int


@dataclass(frozen=True, slots=True)
class Operated:
    """The answer to ``order``. ``refused`` says why it was not carried out; empty: it was. ``at_s`` is the moment, on the run's clock.

    ``said``: the applied fault, as measured.
    """

    order: Operation
    refused: str
    at_s: float
    said: str = ""


@dataclass(frozen=True, slots=True)
class SettingWanted:
    """The only frame of a connection that changes a setting of the run; ``text`` is the value as the user typed it."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class NoticeWanted:
    """In place of ``SettingWanted``: a node will be taken away in ``notice_s``; None: it stays after all. ``node``: its index, its name, or
    the
    first letters of its name."""

    node: str
    notice_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class PauseWanted:
    """In place of ``SettingWanted``: the run has to end in order, as its user, or a program for the user, wants its machines back."""

    reason: str


Wanted = SettingWanted | NoticeWanted | PauseWanted
"""The requests of a user to a run that goes on; ``SettingAnswer`` answers each."""


@dataclass(frozen=True, slots=True)
class SettingAnswer:
    """``refused`` says why the request was refused; empty: it was done. ``way_out`` names a possible request instead."""

    refused: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank of a hanging run: its position, its activity and since when, its last collective, its process's state, its stacks."""

    member: Member
    where: str
    collective: str
    process: str
    stacks: str


@dataclass(frozen=True, slots=True)
class EvidenceGathered:
    """The evidence of one node's agent for ``incident``."""

    node: str
    incident: str
    reason: str
    ranks: tuple[RankEvidence, ...]


UP = Codec([*Event.__args__, AgentHello, SpanBatch, ViewWanted, Operated, SettingWanted, NoticeWanted, PauseWanted, EvidenceGathered])
DOWN = Codec([*Instruction.__args__, AgentWelcome, AgentDismissed, SpanAck, ViewChange, SettingAnswer])
