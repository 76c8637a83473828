"""A journal that is cut off, or has a record from the future, is read as far as it is good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import JournalError
from fleet.host.follow import good_records, open_report
from fleet.host.journal import read_journal
from fleet.protocol import records as r
from fleet.protocol.causes import EndWhy, ProcessEnded
from fleet.protocol.journal import encode_line
from fleet.protocol.types import Member, StateId


def line(*value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


RECORDS: list[r.Record] = [
    r.RunStarted(r.VERSION, "damaged", 0.0, 1.7e9, 2, 0, 16, "{}"),
    r.Committed(StateId(0, 1), 1.0),
    r.ProcessLost(Member(1, 0), ProcessEnded(), None, 1, 1, -1, "", at_s=2.0),
    r.CheckpointRecord("request-1", "failed", StateId(0, 0), 2.0, 0, 0.0, 0.0, "the view changed", view_changed=True),
    r.DataRead(Member(0, 0), 512, 64, at_s=2.0),
    r.RunEnded("failed", "crash loop: slot 1", 3.0, "", "", EndWhy.CRASH_LOOP),
]
LINES = [encode_line(record) for record in RECORDS]


def test_a_journal_that_is_cut_off_anywhere_is_read_as_far_as_it_is_good_and_says_so(tmp_path: Path) -> None:
    data, path = b"".join(LINES), tmp_path / "journal.jsonl"
    for length in range(1, len(data) + 1):
        path.write_bytes(data[:length])
        said: list[str] = []
        good = data.count(b"\n", 0, length)
        assert list(read_journal(path, on_torn=said.append)) == RECORDS[:good]
        torn = not data[:length].endswith(b"\n")
        assert [f"{path}:{good + 1}: the last line is incomplete" in each for each in said] == [True] * torn


@pytest.mark.parametrize("at", range(1, len(LINES)))
def test_what_comes_from_the_future_ends_what_is_read_and_is_named(at: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    future = line("ProcessLost", [1, 0], ["AbductedByAliens"], None, 1, 1, -1, "", 2.0, 5)
    path.write_bytes(b"".join([*LINES[:at], future, *LINES[at:]]))
    records, damage = good_records(path)
    assert len(records) == at and f"{path}:{at + 1}" in damage and "unknown kind 'AbductedByAliens'" in damage
    assert f"{path}:{at + 1}" in open_report(path)[1]


@pytest.mark.parametrize("version", [r.VERSION - 1, r.VERSION + 1])
def test_a_journal_of_another_version_is_refused_by_name(version: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join([line("RunStarted", version, "another"), *LINES[1:]]))
    with pytest.raises(JournalError, match=rf":1: .*version \[{version}\], this Fleet reads version {r.VERSION}"):
        good_records(path)
