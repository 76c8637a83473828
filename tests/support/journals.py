"""What the journal of a run says so far."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fleet.app.plans import RunPlan, describe
from fleet.host.journal import JournalWriter, read_journal
from fleet.protocol.levels import STORE
from fleet.protocol.records import CheckpointRecord, Committed, Record, RunStarted
from fleet.settings.run import RunSettings
from tests.support.waiting import until

NAME = "journal.jsonl"
GOLDEN = Path(__file__).parents[1] / "golden" / "journal-v3.jsonl"
BEGUN = 20
"""So many records a run has that goes on."""


def write_begun(folder: Path) -> None:
    """The journal of a run that goes on, and has begun as a user begins one."""
    plan = RunPlan(name=folder.name, folder=folder, settings=RunSettings(), train=print, script="train.py")
    writer = JournalWriter(folder / NAME)
    for record in list(read_journal(GOLDEN))[:BEGUN]:
        writer.append(replace(record, run=plan.name, config=describe(plan)) if isinstance(record, RunStarted) else record)
    writer.close()


def records(folder: Path) -> list[Record]:
    return list(read_journal(folder / NAME))


def durable(kept: list[Record]) -> list[CheckpointRecord]:
    """Checkpoints that lie whole in the store, where the loss of all hosts does not reach them."""
    return [one for one in kept if isinstance(one, CheckpointRecord) and (one.phase, one.level) == ("durable", STORE)]


def wait_for_checkpoint(folder: Path, limit_s: float = 60.0) -> None:
    """Until a durable checkpoint is in the journal, and a commit: the first checkpoint may come before the first commit is noted."""
    journal = folder / NAME

    def there() -> bool:
        return journal.exists() and b'"durable"' in journal.read_bytes() and any(isinstance(r, Committed) for r in records(folder))

    until(there, "a durable checkpoint and a commit are in the journal", limit_s)
