"""The story of one loss: observations, decisions by rule, and each rank's actions, until training goes on without the rank. Pure.

Numbers, not words, tell which records belong to it. A record names the event that it follows from, and a view names the losses that led to
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import ConfigError
from fleet.ledger.happenings import operation
from fleet.ledger.report import duration
from fleet.ledger.utc import iso, stamp
from fleet.protocol.causes import Evicted
from fleet.protocol.records import (
    Committed,
    DecisionMade,
    EvidenceKept,
    FaultRecord,
    HistoryBegun,
    LossExplained,
    ProcessLost,
    ProcessUp,
    Received,
    Record,
    RunEnded,
    RunStarted,
    ViewPublished,
)
from fleet.protocol.types import Member, View

NAMED = 12
"""The error about an unknown loss names so many of the newest losses."""
SILENCE_S = 60.0
"""Observations of the node within this time before the loss belong to it."""
COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Moment:
    """``after_s``: seconds after the loss, negative before it. ``event``: the event that it follows from, 0 when none."""

    after_s: float
    event: int
    who: str
    text: str

    def line(self, lost_unix_s: float) -> str:
        number = f"#{self.event}" if self.event else ""
        return f"{iso(lost_unix_s + self.after_s)[11:]}  {self.after_s:+9.3f} s  {number:<8} {self.who:<12} {self.text}"


@dataclass(frozen=True, slots=True)
class Story:
    """``loss``: the loss of the story. ``at_s``: its time, from the start of the run on; ``unix_s``: the calendar's time."""

    loss: ProcessLost
    at_s: float
    unix_s: float
    head: str
    moments: tuple[Moment, ...]

    def __str__(self) -> str:
        lines = [self.head, "", *(each.line(self.unix_s) for each in self.moments)]
        return "\n".join(lines) + "\n"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        moments = [
            {"after_s": each.after_s, "at_utc": iso(self.unix_s + each.after_s), "event": each.event, "who": each.who, "text": each.text}
            for each in self.moments
        ]
        return {
            "rank": str(self.loss.member),
            "at_s": self.at_s,
            "at_utc": iso(self.unix_s),
            "cause": str(self.loss.cause),
            "moments": moments,
        }


@dataclass
class _Known:
    """The journal's facts besides the loss itself."""

    records: Sequence[Record]
    place: int
    started: RunStarted | None
    nodes: dict[Member, str] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)

    @property
    def loss(self) -> ProcessLost:
        loss = self.records[self.place]
        assert isinstance(loss, ProcessLost)
        return loss


def why(records: Iterable[Record], name: str) -> Story:
    """The story of the loss of rank ``name``: ``3.0``, or ``3`` for the newest loss of slot 3.

    ``records``: the run's, in order; its ``Spans`` are not needed. Raises ConfigError, with those that were lost, for any other rank.
    """
    journal = list(records)
    known = _Known(journal, _place(journal, name), next((each for each in journal if isinstance(each, RunStarted)), None))
    for record in journal:
        match record:
            case ProcessUp(member=member, process=process):
                known.nodes[member] = process.node
            case ViewPublished(view=view):
                known.views[view.generation] = view
    loss, started = known.loss, known.started
    started_s, zero_s = (started.at_s, started.unix_time_s - started.at_s) if started is not None else (0.0, 0.0)
    moments = sorted(_moments(known), key=lambda moment: moment.after_s)
    return Story(loss, loss.at_s - started_s, zero_s + loss.at_s, _head(known, started_s, zero_s), tuple(moments))


def _place(records: Sequence[Record], name: str) -> int:
    losses = [(place, record) for place, record in enumerate(records) if isinstance(record, ProcessLost)]
    wanted = [place for place, loss in losses if name in (str(loss.member), str(loss.member.slot))]
    if wanted:
        return wanted[-1]
    named = ", ".join(str(loss.member) for _, loss in losses[-NAMED:]) or "none"
    raise ConfigError("--why", name, "no such rank was lost", f"The newest that were lost: {named}.")


def _head(known: _Known, started_s: float, zero_s: float) -> str:
    loss = known.loss
    by = f", by fault {loss.fault}" if loss.fault else ""
    step = f" in step {loss.step}" if loss.step >= 0 else ""
    membership = f"it was in view {loss.generation}" if loss.generation >= 0 else "it was in no view"
    node = f" on node {known.nodes[loss.member]}" if loss.member in known.nodes else ""
    ended = next((r.cause for r in known.records if isinstance(r, LossExplained) and r.member == loss.member), loss.cause)
    explained = loss.cause if isinstance(loss.cause, Evicted) else ended
    when = f"{duration(loss.at_s - started_s)} after the start, {stamp(zero_s + loss.at_s)}"
    return f"rank {loss.member} was lost{step}, {when}: {explained}{by}; {membership}{node}"


def _moments(known: _Known) -> Iterator[Moment]:
    """All records that belong to the loss, in the order of the journal. Its agent saw the end before the coordinator heard of it."""
    loss, declared_s = known.loss, known.loss.at_s
    for record in known.records[: known.place]:
        at_s, said = getattr(record, "at_s", loss.at_s), _before(known, record)
        if isinstance(record, Received) and loss.event and record.event == loss.event:
            declared_s, at_s = record.at_s, loss.at_s if record.what == "ProcessLost" else record.at_s
        if said is not None:
            yield Moment(at_s - loss.at_s, getattr(record, "event", 0), *said)
    yield Moment(declared_s - loss.at_s, loss.event, COORDINATOR, f"rank {loss.member} is declared lost: {loss.cause}")
    yield from _after(known)


def _before(known: _Known, record: Record) -> tuple[str, str] | None:
    """A record that the loss follows from, though the journal has it later."""
    loss = known.loss
    match record:
        case FaultRecord(fault=fault, phase="executed") if fault.id == loss.fault:
            return _words(known, record)
        case Received() if loss.event and record.event == loss.event:
            return _words(known, record)
        case Received(what="NodeSilent") if record.node == known.nodes.get(loss.member) and loss.at_s - record.at_s < SILENCE_S:
            return _words(known, record)
        case DecisionMade() | EvidenceKept() if loss.event and record.event == loss.event:
            return _words(known, record)
    return None


def _after(known: _Known) -> Iterator[Moment]:
    """From the loss on, until ranks commit a step in a view that was made without it; and how its slot is filled again."""
    loss, start = known.loss, -1
    training = loss.generation < 0  # it was in no view, so that no new view was needed
    for record in known.records[known.place + 1 :]:
        after_s, event = getattr(record, "at_s", loss.at_s) - loss.at_s, getattr(record, "event", 0)
        said = _later(known, record) if training else _words(known, record)
        if isinstance(record, RunEnded):
            yield Moment(after_s, event, COORDINATOR, f"the run ends, {record.status}: {record.reason}")
            return
        if isinstance(record, ViewPublished) and not record.graceful and str(loss.member) in record.causes:
            start = record.view.state.step
        elif isinstance(record, Committed) and not training and 0 <= start < record.state.step:
            training, said = True, (COORDINATOR, f"step {record.state.step} is committed: training goes on")
        if said is not None:
            yield Moment(after_s, event, *said)
        if training and isinstance(record, ViewPublished) and _fills(loss, record.view):
            return


def _fills(loss: ProcessLost, view: View) -> bool:
    return any(member.slot == loss.member.slot and member.incarnation > loss.member.incarnation for member in view.members)


def _later(known: _Known, record: Record) -> tuple[str, str] | None:
    """Records after training goes on: how the process ended, the fault if it was reported late, and the slot's next process."""
    loss = known.loss
    match record:
        case LossExplained(member=member) if member == loss.member:
            return _words(known, record)
        case FaultRecord(fault=fault) if fault.id == loss.fault:
            return _words(known, record)
        case ProcessUp(member=member) if member.slot == loss.member.slot:
            return _words(known, record)
        case ViewPublished(view=view) if _fills(loss, view):
            return _words(known, record)
    return None


def _words(known: _Known, record: Record) -> tuple[str, str] | None:
    """The actor of a record, and its action."""
    match record:
        case FaultRecord(fault=fault, phase=phase):
            done = operation(fault, record.members) if phase == "executed" else phase
            return "chaos", f"fault {fault.id}: {done}{f'; {record.detail}' if record.detail else ''}"
        case Received():
            return _received(record)
        case DecisionMade(policy=policy, action=action, reason=reason):
            return COORDINATOR, f"{policy} decides {action.replace('_', ' ')}: {' '.join(reason.split())}"
        case ProcessLost(member=member, cause=cause):
            return COORDINATOR, f"rank {member} is declared lost, too: {cause}"
        case LossExplained(member=member, cause=cause):
            return f"agent {known.nodes.get(member, '')}".rstrip(), f"rank {member}: {cause}"
        case ProcessUp(member=member):
            return COORDINATOR, f"a process fills slot {member.slot} as rank {member}, on node {record.process.node}"
        case EvidenceKept(incident=incident, path=path):
            return COORDINATOR, f"{incident}: stacks of all ranks are in {path}"
        case HistoryBegun(from_state=start):
            return COORDINATOR, f"the run goes back to step {start.step}: {record.reason}"
        case ViewPublished(view=view, graceful=graceful):
            how = "is proposed beside the running steps" if graceful else "is formed"
            ranks = ", ".join(map(str, view.members))
            filled = "; its slot is filled again" if _fills(known.loss, view) else _moved(known, view)
            return COORDINATOR, f"view {view.generation} {how}, from step {view.state.step}: ranks {ranks}{filled}"
    return None


WORDS = {
    "ProcessLost": "has seen the end of rank {member}",
    "NodeSilent": "the line to the agent of node {node} broke",
    "NodeLost": "node {node} is gone",
    "Raised": "its train function raised: {detail}",
    "Quiesced": "has left view {generation}{step} ({detail})",
    "Formed": "is in view {generation}{step}",
    "Joined": "says hello",
    "Tick": "looks at the clock",
}
"""Event -> its text. A rank sends the events of ``OF_RANKS``."""
OF_RANKS = ("Raised", "Quiesced", "Formed", "Finished", "Left", "Joined", "Ready")


def _received(record: Received) -> tuple[str, str]:
    step = f", at step {record.step}" if record.step >= 0 else ""
    words = WORDS.get(record.what, f"{record.what} {{detail}}")
    text = words.format(member=record.member, node=record.node, generation=record.generation, step=step, detail=record.detail).strip()
    if record.what in OF_RANKS:
        return f"rank {record.member}", text
    return (f"agent {record.node}" if record.what == "ProcessLost" else COORDINATOR), text


def _moved(known: _Known, view: View) -> str:
    """The ranks that took over the shards of the lost rank."""
    before = known.views.get(known.loss.generation)
    if before is None or known.loss.member not in before.members or view.generation <= before.generation:
        return ""
    first, end = before.ranges[before.rank_of(known.loss.member)]
    parts = [(max(first, b), min(end, e), member) for member, (b, e) in zip(view.members, view.ranges, strict=True)]
    gone = ", ".join(f"{f'{b}-{e - 1}' if e > b + 1 else b} to {member}" for b, e, member in parts if b < e)
    return f"; of its shards {gone}" if gone else ""
