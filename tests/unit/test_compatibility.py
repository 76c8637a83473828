"""What ``docs/compatibility.md`` promises of data that has been written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleet.app.report import build_report
from fleet.protocol import records
from fleet.protocol.journal import JournalWriter, read_journal
from storage.checkpoint import manifest
from tests.unit.test_report import golden_story

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
JOURNALS = sorted(GOLDEN.glob("journal-v*.jsonl"))
"""One of each version, as it was written then. Only that of a new version is ever added: ``python -m tests.unit.test_compatibility``."""


SINCE = (records.Usage,)
"""Kinds of records that came after the newest of these journals was written."""


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.stem)
def test_a_journal_of_each_version_is_read_and_means_what_it_meant(journal: Path) -> None:
    """What the golden report says of it, but for records that came since; that report is pinned by ``tests/unit/test_report.py``."""
    story = [record for record in golden_story().records if not isinstance(record, SINCE)]
    assert build_report(read_journal(journal)).to_json() == build_report(story).to_json()


def test_there_is_a_journal_of_the_version_that_is_written() -> None:
    assert f"journal-v{records.VERSION}.jsonl" in {path.name for path in JOURNALS}


def test_the_document_names_the_formats_of_today() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert re.findall(r"\| version (\d+) \|", text) == [str(records.VERSION)]
    assert re.findall(r"\| version (\d+) of the manifest \|", text) == [str(manifest.VERSION)]


if __name__ == "__main__":
    writer = JournalWriter(GOLDEN / f"journal-v{records.VERSION}.jsonl")
    for record in golden_story().records:
        writer.append(record)
    writer.close()
