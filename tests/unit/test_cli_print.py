"""How commands print: whole lines, whatever the width; and a reader that has gone is no error."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.app.cli.prints import Terminal, table
from fleet.app.progress import LiveView
from fleet.app.progress_calls import Progress, reporting
from fleet.host.follow import Follower
from fleet.host.processes import calling
from fleet.host.rank_logs import RunLogs, log_path, logs_of, prefix
from fleet.protocol.journal import encode_line
from fleet.protocol.types import Member
from tests.golden.journals import one_loss
from tests.support.waiting import until

LONG = "a line " * 40


@pytest.fixture
def broken() -> Iterator[io.TextIOWrapper]:
    """A stream whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    yield stream
    stream.close()


def test_lines_are_neither_wrapped_nor_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    Terminal().print(LONG)
    assert capsys.readouterr().out == LONG + "\n"
    assert table(("a", "b"), [("x" * 100, "y")]) == ["a" + " " * 101 + "b", "x" * 100 + "  y"]


def test_a_reader_that_leaves_silences_the_terminal_and_ends_nothing(broken: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", broken)
    console = Terminal(stderr=True)
    for _ in range(3):
        console.print("who reads this?")
    assert console.quiet
    broken.write("nor does what is still in the buffer complain")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "story" / "journal.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"".join(map(encode_line, one_loss("gpu-1").records)))
    log = log_path(logs_of(path.parent), Member(1, 0))
    log.parent.mkdir()
    log.write_text("printed by a rank " + LONG + "\n")
    return path


def test_a_pipe_gets_whole_plain_lines(journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    times = iter(range(0, 10_000, 20))
    with LiveView(Follower(journal), Terminal(), lambda: float(next(times)), RunLogs(logs_of(journal.parent))):
        seen: list[str] = []
        until(lambda: "goodput" in "".join(seen.append(capsys.readouterr().out) or seen), "a plain line is printed")
    lines = ("".join(seen) + capsys.readouterr().out).splitlines()
    assert f"[rank 1] printed by a rank {LONG}" in lines
    assert [line for line in lines if "fault gpu-1" in line] == [
        "    2.1 s  ! fault gpu-1: SIGKILL to rank 1 (gpu)",
        "    2.1 s  - rank 1 is lost: killed (SIGKILL) by fault gpu-1",
    ]
    assert any(line.startswith("    7.3 s    step 60  ") and line.endswith("  1 fault survived") for line in lines)


def test_a_command_whose_reader_leaves_says_nothing_about_it(journal: Path) -> None:
    log_path(logs_of(journal.parent), Member(0, 0)).write_text("a line\n" * 100_000)
    command = calling("fleet.app.cli.main", "main", "logs", str(journal.parent))
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None and started.stderr is not None
    assert started.stdout.readline() == b"[rank 0] a line\n"
    started.stdout.close()
    said = started.stderr.read()
    started.stderr.close()
    assert (started.wait(60), said) == (0, b"")


def test_a_function_is_told_how_far_a_run_is_and_what_it_raises_ends_nothing(journal: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Progress] = []

    def report(one: Progress) -> None:
        seen.append(one)
        raise ValueError("what the user's function raises")

    with reporting(journal, report):
        until(lambda: len(seen) > 1, "it is called again and again")
    assert [one.ended for one in seen] == [*[False] * (len(seen) - 1), True]
    assert {one.step for one in seen} == {60} and seen[0].event and seen[-1].event
    assert str(seen[-1]).startswith("    7.3 s  step 60") and "goodput" in str(seen[-1])
    assert len([one for one in caplog.records if "progress= raised" in one.getMessage()]) == 1
    with reporting(journal, None):
        pass


def test_what_ranks_print_comes_with_how_far_the_run_is(journal: Path) -> None:
    path = log_path(logs_of(journal.parent), Member(1, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("before\n")
    seen: list[Progress] = []
    with reporting(journal, seen.append):
        with path.open("a") as printed:
            printed.write("hello\n")
        until(lambda: any(one.printed for one in seen), "it is told")
    assert [line for one in seen for line in one.printed] == [prefix(Member(1, 0)) + "hello"]
    shown = next(one for one in seen if one.printed)
    assert str(shown).splitlines()[0] == prefix(Member(1, 0)) + "hello"
