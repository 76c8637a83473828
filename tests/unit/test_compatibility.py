"""What ``docs/compatibility.md`` promises of data that has been written."""

from __future__ import annotations

import re
from pathlib import Path

from fleet.app.report import build_report
from fleet.host.journal import JournalWriter, read_journal
from fleet.protocol import records
from fleet.protocol.journal import encode_line
from storage.checkpoint import manifest
from tests.unit.test_report import golden_story

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
JOURNAL = GOLDEN / f"journal-v{records.VERSION}.jsonl"
"""As it was written once: ``python -m tests.unit.test_compatibility``. A format that changes has another version, and another file."""


def test_a_journal_of_this_version_is_read_and_means_what_it_meant() -> None:
    """What the golden report says of it, which is pinned by ``tests/unit/test_report.py``."""
    assert build_report(read_journal(JOURNAL)).to_json() == build_report(golden_story().records).to_json()


def test_it_is_written_as_it_was() -> None:
    assert b"".join(map(encode_line, golden_story().records)) == JOURNAL.read_bytes()


def test_the_document_names_the_formats_of_today() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert re.findall(r"\| version (\d+) \|", text) == [str(records.VERSION)]
    assert re.findall(r"\| version (\d+) of the manifest \|", text) == [str(manifest.VERSION)]


if __name__ == "__main__":
    JOURNAL.unlink(missing_ok=True)
    writer = JournalWriter(JOURNAL)
    for record in golden_story().records:
        writer.append(record)
    writer.close()
