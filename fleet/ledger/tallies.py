"""What is counted beside the ledger's time: who lives where, what was decided, when things last happened."""

from __future__ import annotations

from collections import Counter

from fleet.ledger.scorecard import Scorecard
from fleet.ledger.stored import Stored
from fleet.ledger.summary import SlotUsage, Tallies
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    DecisionMade,
    ProcessLost,
    ProcessUp,
    Record,
    RefusedLines,
    Usage,
    ViewPublished,
)
from fleet.protocol.types import Member


class Tally:
    """Folds records into :class:`fleet.ledger.summary.Tallies`."""

    def __init__(self) -> None:
        self._nodes: dict[Member, str] = {}
        self._joined: frozenset[Member] = frozenset()
        self._losses: Counter[int] = Counter()
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._commit_s: float | None = None
        self._durable_s: float | None = None
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
        match record:
            case Committed(at_s=at_s):
                self._commit_s = at_s
            case ProcessUp(member=member, process=process):
                self._nodes[member] = process.node
            case ProcessLost(member=member):
                self._nodes.pop(member, None)
                self._losses[member.slot] += 1
            case ViewPublished(view=view):
                self._joined = frozenset(view.members)
            case DecisionMade(policy=policy, action=action):
                self._decisions[policy, action] += 1
            case RefusedLines(listener=listener, reason=reason, count=count):
                self._refused[listener, reason] += count
            case Usage(member=member):
                self._usage[member] = record
            case CheckpointRecord(phase="durable", at_s=at_s, bytes=size, level="store"):
                self._durable_s, self._bytes = at_s, size

    def now(self) -> Tallies:
        """An immutable copy."""
        return Tallies(
            last_commit_s=self._commit_s,
            last_durable_s=self._durable_s,
            checkpoint_bytes=self._bytes,
            standing_by=len(self._nodes.keys() - self._joined),
            worst_slot_losses=max(self._losses.values(), default=0),
            ranks_by_node=Counter(self._nodes.values()),
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
