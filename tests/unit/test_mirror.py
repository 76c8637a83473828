"""The journal's copy in the run's storage."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec

from storage.mirror import JournalMirror, fetch_journal


def test_what_is_added_is_copied_and_comes_back(tmp_path: Path) -> None:
    url = f"memory://mirror-{uuid.uuid4().hex}"
    journal, back = tmp_path / "journal.jsonl", tmp_path / "elsewhere" / "journal.jsonl"
    mirror = JournalMirror(url)
    journal.write_text("one\n")
    assert mirror.copy(journal)
    assert not mirror.copy(journal)
    journal.write_text("one\ntwo\n")
    assert mirror.copy(journal)
    assert fetch_journal(url, back)
    assert back.read_text() == "one\ntwo\n"
    assert not fetch_journal(url, back)
    fsspec.filesystem("memory").rm(url, recursive=True)
