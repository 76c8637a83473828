"""What ranks print, as the page is given it: listed, in pieces, and nothing that lies elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dashboards.pages.logs import MOST_BYTES, log_files, log_piece
from fleet.host.rank_logs import FOLDER


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / FOLDER).mkdir(parents=True)
    return tmp_path / "run"


def written(run: Path, name: str, data: bytes) -> Path:
    path = run / FOLDER / name
    path.write_bytes(data)
    return path


def test_logs_are_listed_by_slot_and_process(run: Path) -> None:
    for name in ("rank-10.0.log", "rank-2.1.log", "rank-2.0.log", "rank-x.0.log", "notes.txt", "rank-1.0.log.old"):
        written(run, name, b"one\n")
    assert log_files(run) == [
        {"slot": 2, "incarnation": 0, "bytes": 4}, {"slot": 2, "incarnation": 1, "bytes": 4}, {"slot": 10, "incarnation": 0, "bytes": 4},
    ]  # fmt: skip
    assert log_files(run / "nowhere") == []


def test_a_log_is_followed_piece_by_piece(run: Path) -> None:
    path = written(run, "rank-0.0.log", b"one\ntwo\n")
    first = log_piece(run, 0, 0)
    assert first == {"offset": 0, "next": 8, "bytes": 8, "text": "one\ntwo\n"}
    with path.open("ab") as file:
        file.write("thr\u00e9e\n".encode())
    second = log_piece(run, 0, 0, first["next"])
    assert second is not None and second["text"] == "thr\u00e9e\n"
    assert log_piece(run, 0, 0, second["next"]) == {"offset": 15, "next": 15, "bytes": 15, "text": ""}
    assert log_piece(run, 0, 1) is None


def test_of_a_long_log_the_last_whole_lines_come_first_and_a_piece_is_bounded(run: Path) -> None:
    lines = b"".join(b"line %06d\n" % number for number in range(20_000))
    written(run, "rank-0.0.log", lines)
    last = log_piece(run, 0, 0)
    assert last is not None and last["next"] == len(lines)
    assert last["text"].startswith("line ") and last["text"].endswith("line 019999\n") and len(last["text"]) <= MOST_BYTES
    offset, reported = 0, ""
    while offset < len(lines):
        piece = log_piece(run, 0, 0, offset)
        assert piece is not None and len(piece["text"]) <= MOST_BYTES
        offset, reported = piece["next"], reported + piece["text"]
    assert reported.encode() == lines


def test_a_character_that_is_half_written_waits_for_its_rest_and_bytes_that_are_no_text_do_not(run: Path) -> None:
    path = written(run, "rank-0.0.log", b"a\xc3")
    piece = log_piece(run, 0, 0)
    assert piece is not None and (piece["text"], piece["next"]) == ("a", 1)
    path.write_bytes(b"a\xc3\xa9\xff\n")
    piece = log_piece(run, 0, 0, 1)
    assert piece is not None and (piece["text"], piece["next"]) == ("\u00e9\ufffd\n", 5)


def test_a_log_that_was_made_anew_is_read_from_its_start(run: Path) -> None:
    written(run, "rank-0.0.log", b"new\n")
    piece = log_piece(run, 0, 0, 500)
    assert piece is not None and (piece["offset"], piece["text"]) == (0, "new\n")


def test_links_and_pipes_are_not_followed(run: Path) -> None:
    secret = run.parent / "secret"
    secret.write_text("secret\n")
    (run / FOLDER / "rank-0.0.log").symlink_to(secret)
    os.mkfifo(run / FOLDER / "rank-1.0.log")
    assert log_files(run) == []
    assert log_piece(run, 0, 0) is None and log_piece(run, 1, 0) is None
