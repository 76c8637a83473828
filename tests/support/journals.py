"""What the journal of a run says so far."""

from __future__ import annotations

from pathlib import Path

from fleet.host.journal import read_journal
from fleet.protocol.records import CheckpointRecord, Committed, Record
from tests.support.waiting import until

NAME = "journal.jsonl"


def records(folder: Path) -> list[Record]:
    return list(read_journal(folder / NAME))


def durable(kept: list[Record]) -> list[CheckpointRecord]:
    return [record for record in kept if isinstance(record, CheckpointRecord) and record.phase == "durable"]


def wait_for_checkpoint(folder: Path, limit_s: float = 60.0) -> None:
    """Until a durable checkpoint is in the journal, and a commit: the first checkpoint may come before the first commit is noted."""
    journal = folder / NAME

    def there() -> bool:
        return journal.exists() and b'"durable"' in journal.read_bytes() and any(isinstance(r, Committed) for r in records(folder))

    until(there, "a durable checkpoint and a commit are in the journal", limit_s)
