"""Counts beside the ledger's time: the process of each slot, decisions, and times of the last events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from fleet.ledger.bill import Stored
from fleet.ledger.summary import SlotUsage, Tallies
from fleet.ledger.verdicts import Scorecard
from fleet.protocol.causes import Evicted
from fleet.protocol.decisions import Called
from fleet.protocol.fault_kinds import kind_of
from fleet.protocol.records import (
    STANDBY,
    CheckpointRecord,
    Committed,
    DecisionMade,
    FaultRecord,
    LossExplained,
    ProcessLost,
    ProcessUp,
    Record,
    RefusedLines,
    Resumed,
    Spans,
    Usage,
    ViewPublished,
)
from fleet.protocol.types import Member, in_words

LOST, STANDS_BY, STARTS, TRAINS = "lost", "stands by", "starts", "trains"


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """The process of a slot. ``shards`` is the half-open range that it computes, None when it computes none. ``injected``: kinds of the
    injected faults that last, and are not healed. ``coordinate``: ``tensor=1``, where ranks compute a shard together; else empty."""

    slot: int
    incarnation: int
    state: str
    node: str = ""
    pid: int = 0
    shards: tuple[int, int] | None = None
    cause: str = ""
    injected: tuple[str, ...] = ()
    coordinate: str = ""

    @property
    def member(self) -> Member:
        """The process as a member."""
        return Member(self.slot, self.incarnation)


class Tally:
    """Folds records into :class:`fleet.ledger.summary.Tallies`."""

    def __init__(self) -> None:
        self._slots: dict[int, SlotStatus] = {}
        self._joined: dict[Member, tuple[int, int]] = {}
        self._open: dict[str, FaultRecord] = {}
        self._losses: Counter[int] = Counter()
        self._evicted: set[Member] = set()
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._commit_s: float | None = None
        self._durable_s: float | None = None
        self._asked_s: dict[str, float] = {}
        self._bytes = 0
        self._refused: Counter[tuple[str, str]] = Counter()
        self._usage: dict[Member, Usage] = {}
        self._scorecard = Scorecard()
        self.stored = Stored(1)

    def started(self, keep: int) -> None:
        """The run has begun, and keeps so many durable checkpoints."""
        self.stored = Stored(keep)

    def add(self, record: Record) -> None:
        self._scorecard.add(record)
        self.stored.add(record)
        self._checkpoint(record)
        match record:
            case Committed(at_s=at_s):
                self._commit_s = at_s
            case Spans(member=member, codes=codes) if codes.endswith(STANDBY):
                self._stands_by(member)
            case ProcessUp(member=member, process=process):
                place = in_words(member.coordinate)
                self._slots[member.slot] = SlotStatus(member.slot, member.incarnation, STARTS, process.node, process.pid, coordinate=place)
            case ProcessLost(member=member, cause=cause):
                self._losses[member.slot] += 1
                self._evicted |= {member} if isinstance(cause, Evicted) else set()
                before = self._slots.get(member.slot, SlotStatus(member.slot, member.incarnation, STARTS))
                if before.incarnation <= member.incarnation:
                    gone = replace(before, incarnation=member.incarnation, state=LOST, shards=None, cause=str(cause), injected=())
                    self._slots[member.slot] = gone
            case LossExplained(member=member, cause=cause):
                rank = self._slots.get(member.slot)
                if rank is not None and (rank.member, rank.state) == (member, LOST) and member not in self._evicted:
                    self._slots[member.slot] = replace(rank, cause=str(cause))
            case FaultRecord(fault=fault, phase="executed") if kind_of(fault.kind).lasts:
                self._open[fault.id] = record
            case FaultRecord(fault=fault, phase="healed"):
                self._open.pop(fault.id, None)
            case Resumed(gap=True):
                self._open.clear()
            case ViewPublished(view=view):
                self._joined = {view.members[rank]: view.ranges[rank] for rank in view.computing}
                for member in view.members:
                    if member.slot not in self._slots or self._slots[member.slot].incarnation < member.incarnation:
                        self._slots[member.slot] = SlotStatus(member.slot, member.incarnation, STARTS)
                    self._stands_by(member)
            case DecisionMade(policy=policy, action=action, payload=payload):
                self._decisions[policy, action] += 1
                if isinstance(payload, Called) and (called := self._slots.get(payload.slot)) is not None:
                    self._slots[payload.slot] = replace(called, coordinate=in_words(payload.coordinate))
            case RefusedLines(listener=listener, reason=reason, count=count):
                self._refused[listener, reason] += count
            case Usage(member=member):
                self._usage[member] = record

    def _checkpoint(self, record: Record) -> None:
        match record:
            case CheckpointRecord(level="store", phase="requested", checkpoint=name, at_s=at_s):
                self._asked_s[name] = at_s
            case CheckpointRecord(level="store", phase=phase, checkpoint=name, at_s=at_s, bytes=size):
                self._asked_s.pop(name, None)
                if phase == "durable":
                    self._durable_s, self._bytes = at_s, size
            case Resumed(gap=True):  # a request is forgotten with the ranks that got it
                self._asked_s.clear()

    def _stands_by(self, member: Member) -> None:
        """The process is ready, in a view or not."""
        rank = self._slots.get(member.slot)
        if rank is not None and (rank.member, rank.state) == (member, STARTS):
            self._slots[member.slot] = replace(rank, state=STANDS_BY)

    def slots(self) -> list[SlotStatus]:
        """The ranks by slot, with the faults on each."""
        return [self._slot(rank) for _, rank in sorted(self._slots.items())]

    def _slot(self, rank: SlotStatus) -> SlotStatus:
        shards = self._joined.get(rank.member) if rank.state != LOST else None
        injected = tuple(record.fault.kind for record in self._open.values() if rank.member in record.members)
        return replace(rank, state=rank.state if shards is None else TRAINS, shards=shards, injected=injected)

    def injected(self) -> tuple[str, ...]:
        """Kinds of faults that strike a shared resource, such as the store, and are not healed."""
        return tuple(record.fault.kind for record in self._open.values() if record.fault.slot is None and record.fault.node is None)

    def now(self) -> Tallies:
        """An immutable copy."""
        live = {rank.member: rank.node for rank in self._slots.values() if rank.state != LOST and rank.node}
        return Tallies(
            last_commit_s=self._commit_s,
            last_durable_s=self._durable_s,
            pending_s=min(self._asked_s.values(), default=None),
            checkpoint_bytes=self._bytes,
            standing_by=len(live.keys() - self._joined.keys()),
            worst_slot_losses=max(self._losses.values(), default=0),
            ranks_by_node=Counter(live.values()),
            decisions=dict(self._decisions),
            refused=dict(self._refused),
            score=self._scorecard.now(),
            usage=self._by_slot(),
        )

    def _by_slot(self) -> dict[int, SlotUsage]:
        found: dict[int, SlotUsage] = {}
        for member, usage in self._usage.items():
            before = found.get(member.slot, SlotUsage())
            found[member.slot] = SlotUsage(
                max(before.peak_bytes, usage.peak_bytes),
                max(before.device_peak_bytes, usage.device_peak_bytes),
                before.sent_bytes + usage.sent_bytes,
                before.exchanges + usage.exchanges,
                before.hidden_s + usage.hidden_us / 1e6,
                before.received_bytes + usage.received_bytes,
                before.ahead_bytes + usage.ahead_bytes,
                before.energy_j + usage.energy_j,
                before.metered_s + usage.metered_s,
            )
        return found
