"""What lies in the durable store, and what was read from it: bytes, and bytes over time. Pure.

Storage is paid for by what lies there and for how long, and what leaves a store is paid for once more. Checkpoints are what a run has
there; files of data, and its journal, are not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from fleet.ledger.health import HOUR_S
from fleet.protocol.levels import STORE
from fleet.protocol.records import CheckpointRecord, Record, Usage
from fleet.protocol.types import Member

GB = 1e9
MONTH_S = 730 * HOUR_S
"""As providers count: 8,760 hours a year, in twelve parts."""


class Stored:
    """Folds records. The newest ``keep`` durable checkpoints lie in the store; a withdrawn one stays until newer ones push it out."""

    def __init__(self, keep: int) -> None:
        self._kept: deque[int] = deque(maxlen=max(1, keep))
        self._byte_s, self._since_s = 0.0, 0.0
        self._read: dict[Member, int] = {}

    def add(self, record: Record) -> None:
        """Durable checkpoints, and what ranks have read of them."""
        if isinstance(record, CheckpointRecord) and record.phase == "durable" and record.level == STORE:
            self._byte_s = self.byte_s(record.at_s)
            self._since_s = record.at_s
            self._kept.append(record.bytes)
        elif isinstance(record, Usage) and record.fetched_bytes:
            self._read[record.member] = record.fetched_bytes

    def byte_s(self, now_s: float) -> float:
        """Bytes times the seconds that they have been there, up to ``now_s``."""
        return self._byte_s + sum(self._kept) * max(0.0, now_s - self._since_s)

    @property
    def read_bytes(self) -> int:
        """Of all processes."""
        return sum(self._read.values())


def store_bill(cost: Mapping[str, Any], byte_s: float, read_bytes: float) -> dict[str, float] | None:
    """What the store has cost: ``gb_months``, ``gb_read`` and ``usd``; None where no setting ``cost.*`` says what it costs.

    Args:
        cost: settings of a run, as its journal has them (see ``fleet.settings.cost``).
        byte_s: what lay there, in bytes times seconds.
        read_bytes: what was read, in bytes.
    """
    month, read = cost.get("usd_per_gb_month"), cost.get("usd_per_gb_read")
    if month is None and read is None:
        return None
    months, gb = byte_s / GB / MONTH_S, read_bytes / GB
    return {"gb_months": months, "gb_read": gb, "usd": months * (month or 0.0) + gb * (read or 0.0)}
