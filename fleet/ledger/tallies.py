"""What is counted beside the ledger's time: who lives where, what was decided, when things last happened."""

from __future__ import annotations

from collections import Counter

from fleet.ledger.summary import Tallies
from fleet.protocol.records import CheckpointRecord, Committed, DecisionMade, ProcessLost, ProcessUp, Record, ViewPublished
from fleet.protocol.types import Member


class Tally:
    """Folds records into :class:`fleet.ledger.summary.Tallies`."""

    def __init__(self) -> None:
        self._nodes: dict[Member, str] = {}
        self._seated: frozenset[Member] = frozenset()
        self._losses: Counter[int] = Counter()
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._commit_s: float | None = None
        self._durable_s: float | None = None
        self._bytes = 0

    def add(self, record: Record) -> None:
        match record:
            case Committed(at_s=at_s):
                self._commit_s = at_s
            case ProcessUp(member=member, process=process):
                self._nodes[member] = process.node
            case ProcessLost(member=member):
                self._nodes.pop(member, None)
                self._losses[member.slot] += 1
            case ViewPublished(view=view):
                self._seated = frozenset(view.members)
            case DecisionMade(policy=policy, action=action):
                self._decisions[policy, action] += 1
            case CheckpointRecord(phase="durable", at_s=at_s, bytes=size, level="store"):
                self._durable_s, self._bytes = at_s, size

    def now(self) -> Tallies:
        """An immutable copy."""
        return Tallies(
            last_commit_s=self._commit_s,
            last_durable_s=self._durable_s,
            checkpoint_bytes=self._bytes,
            standing_by=len(self._nodes.keys() - self._seated),
            worst_slot_losses=max(self._losses.values(), default=0),
            ranks_by_node=Counter(self._nodes.values()),
            decisions=dict(self._decisions),
        )
