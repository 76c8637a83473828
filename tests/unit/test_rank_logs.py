"""What ranks print: where it lies, how it is read, and that it costs nobody more than it may."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.rank.telemetry import logs
from actors.rank.telemetry.logs import LOOK_BYTES, RankLog
from fleet.host.rank_logs import MOST_LOOKS, REHEARSAL, REHEARSED, RunLogs, Tail, found, log_path, logs_of, older, shown
from fleet.protocol.types import Member

ZERO = Member(0, 0)


def said(folder: Path, body: str) -> int:
    """Run ``body`` in a process of its own whose standard streams lead to rank 0's file; returns how it ended."""
    head = (
        f"from actors.rank.telemetry.logs import RankLog\nfrom pathlib import Path\nlog = RankLog(Path({str(log_path(folder, ZERO))!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", head + body], check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")
    return done.returncode


def test_of_a_killed_process_nothing_is_lost_that_it_has_printed(tmp_path: Path) -> None:
    body = """
import logging, os, signal, subprocess, sys, ctypes, warnings
print("from Python", 1)
print("an error", file=sys.stderr)
subprocess.run(["echo", "from a child"])
ctypes.CDLL(None).dprintf(2, b"from a C library\\n")
logging.getLogger("mine").info("not shown: no handler")
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
logging.info("shown")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert said(tmp_path, body) == -signal.SIGKILL
    lines = ["from Python 1", "an error", "from a child", "from a C library", "INFO shown"]
    assert log_path(tmp_path, ZERO).read_text().splitlines() == lines


def test_a_handler_that_ray_has_put_on_the_root_logger_does_not_disarm_basic_config(tmp_path: Path) -> None:
    body = "import logging\nlogging.basicConfig(level=30)\nlogging.info('no')\nlogging.warning('yes')\n"
    head = "import logging\nlogging.getLogger().addHandler(logging.NullHandler())\nlogging.getLogger().setLevel(10)\n"
    path = log_path(tmp_path, ZERO)
    made = f"from actors.rank.telemetry.logs import RankLog\nfrom pathlib import Path\nlog = RankLog(Path({str(path)!r}))\n"
    subprocess.run([sys.executable, "-c", head + made + body], check=True, timeout=60)
    assert path.read_text() == "WARNING:root:yes\n"


def test_what_was_is_there_again_afterwards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers, before = logging.getLogger().handlers[:], (sys.stdout, sys.stderr)
    printed = RankLog(log_path(tmp_path, ZERO))
    os.write(1, b"in the file\n")
    printed.close()
    printed.limit()
    os.write(1, b"in the terminal\n")
    assert (logging.getLogger().handlers, (sys.stdout, sys.stderr)) == (handlers, before)
    assert (capfd.readouterr().out, log_path(tmp_path, ZERO).read_text()) == ("in the terminal\n", "in the file\n")


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").write_text("a file")
    printed = RankLog(log_path(tmp_path / "logs", ZERO))
    printed.rehearse(True)
    printed.limit()
    printed.close()
    assert "the output of this rank is not kept" in caplog.text


def test_a_file_that_cannot_be_begun_anew_grows_on_and_says_why(tmp_path: Path) -> None:
    path = log_path(tmp_path / "logs", ZERO)
    printed = RankLog(path, 10)
    os.write(1, b"more than ten bytes\n")
    path.rename(tmp_path / "elsewhere")
    path.parent.rmdir()
    printed.limit()
    os.write(1, b"and more\n")
    printed.close()
    first, why, last = (tmp_path / "elsewhere").read_text().splitlines()
    assert (first, last) == ("more than ten bytes", "and more") and "grows on: " in why


def test_no_more_is_kept_than_was_agreed_and_the_file_says_so(tmp_path: Path) -> None:
    path = log_path(tmp_path, ZERO)
    body = f"log.close()\nlog = RankLog(Path({str(path)!r}), 1000)\nfor i in range(100):\n  print('x' * 90, i)\n  log.limit()\n"
    assert said(tmp_path, body) == 0
    assert path.stat().st_size < 1100 and older(path).stat().st_size < 1100
    first = path.read_text().splitlines()[0]
    assert first == "[fleet] the lines before this one are in rank-0.0.log.1, and those before them were dropped"
    assert path.read_text().splitlines()[-1].endswith(" 99")


# ---- reading -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Member, str], Path]:
    def append(member: Member, text: str) -> Path:
        path = log_path(logs_of(tmp_path), member)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        return path

    return append


def test_lines_come_once_with_their_rank_and_in_order(tmp_path: Path, write: Callable[[Member, str], Path]) -> None:
    logs = RunLogs(logs_of(tmp_path))
    assert list(logs.poll()) == []
    write(Member(10, 0), "late\n")
    write(Member(2, 1), "second process\n")
    write(Member(2, 0), "one\n\ntwo\nhal")
    assert list(logs.poll()) == ["[rank 2] one", "[rank 2] ", "[rank 2] two", "[rank 2.1] second process", "[rank 10] late"]
    write(Member(2, 0), "f")
    assert list(logs.poll()) == []
    assert list(logs.poll(last=True)) == ["[rank 2] half"]
    assert list(found(logs_of(tmp_path), 2)) == [Member(2, 0), Member(2, 1)]
    logs.close()


def test_a_rank_that_prints_without_end_is_counted_and_not_shown(tmp_path: Path, write: Callable[[Member, str], Path]) -> None:
    logs = RunLogs(logs_of(tmp_path))
    path = write(ZERO, "".join(f"line {i}\n" for i in range(200_000)))
    write(Member(1, 0), "heard\n")
    assert list(logs.poll(2)) == ["[rank 0] line 0", "[rank 0] line 1", "[rank 1] heard"]
    write(ZERO, "a\nb\nc\n")
    assert list(logs.poll(2)) == ["[rank 0] a", "[rank 0] b"]
    assert list(logs.poll(2)) == [f"[rank 0] ... 199,999 lines more in {path}"], "when it has ended"
    assert list(logs.poll(2)) == []
    for look in range(MOST_LOOKS):
        write(ZERO, "x\n" * 3)
        said = list(logs.poll(2))
        assert (f"[rank 0] ... 8 lines more in {path}" in said) == (look == MOST_LOOKS - 1), "and now and then"
    logs.close()


def test_what_is_printed_in_a_rehearsal_is_in_the_file_alone(tmp_path: Path, write: Callable[[Member, str], Path]) -> None:
    everything = f"before\n{REHEARSAL}\nnot real\n{REHEARSED}\nreal\n"
    write(ZERO, everything)
    live, all_ = RunLogs(logs_of(tmp_path)), RunLogs(logs_of(tmp_path))
    assert list(live.poll()) == ["[rank 0] before", "[rank 0] real"]
    assert list(all_.poll(None)) == [f"[rank 0] {line}" for line in everything.splitlines()]
    for each in (live, all_):
        each.close()


def test_a_file_that_was_begun_anew_is_read_on(tmp_path: Path, write: Callable[[Member, str], Path]) -> None:
    path = write(ZERO, "first\n")
    tail = Tail(path)
    assert list(tail.lines()) == [b"first"]
    write(ZERO, "second\n")
    path.rename(older(path))
    write(ZERO, "third\n")
    assert list(tail.lines()) == [b"second", b"third"]
    tail.close()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain", "plain"),
        (b"10%\r 20%\r100%\r", "100%"),
        (b"\x1b[31mred\x1b[0m \x1b[2Kand\x1b]0;title\x07 \x07\x00more", "red and more"),
        ("Grüße\t\u2713".encode(), "Grüße   \u2713"),
        (b"\xff", "\ufffd"),
    ],
)
def test_a_line_moves_no_cursor(line: bytes, text: str) -> None:
    assert shown(line) == text


# ---- a disk that is full -----------------------------------------------------------------------------------------------------------------


def test_output_that_cannot_be_written_is_dropped_and_counted_and_the_train_function_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reported = log_path(tmp_path, ZERO), list[tuple[int, str]]()
    printed = RankLog(path)
    printed.on_dropped = lambda dropped_bytes, why: reported.append((dropped_bytes, why))
    right, full = os.write, [False]

    def write(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    print("before")
    full[0] = True
    for _ in range(3):
        print("x" * 99)
        printed.limit()
    full[0] = False
    print("after")
    printed.close()
    monkeypatch.undo()
    assert path.read_text().splitlines() == [
        "before", f"[fleet] 300 bytes were dropped here: [Errno 28] No space left on device: {path}", "after",
    ]  # fmt: skip
    assert [number for number, _ in reported] == [100, 300], "once when it begins, and once all of them"
    assert "No space left" in reported[0][1]


def test_output_leaves_the_last_of_a_disk_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reported = log_path(tmp_path, ZERO), list[tuple[int, str]]()
    printed = RankLog(path)
    printed.on_dropped = lambda dropped_bytes, why: reported.append((dropped_bytes, why))
    room = [True]
    monkeypatch.setattr(logs, "has_room", lambda descriptor: room[0])
    line = "x" * (LOOK_BYTES // 2 - 1)
    print(line)
    room[0] = False
    for _ in range(4):
        print(line)
    printed.close()
    assert LOOK_BYTES // 2 <= path.stat().st_size <= LOOK_BYTES * 3 // 2
    assert "bytes were dropped here: little of the disk is left" in path.read_text().splitlines()[-1]
    assert "little of the disk is left" in reported[-1][1]


@pytest.mark.parametrize(
    ("size_bytes", "free_bytes", "room"),
    [(64 << 20, 20 << 20, True), (64 << 20, 15 << 20, False), (8 << 20, 3 << 20, True), (8 << 20, 1 << 20, False),
     (100 << 30, 3 << 30, True), (100 << 30, 1 << 29, False), (1 << 44, 2 << 30, True)],
)  # fmt: skip
def test_how_much_of_a_disk_output_leaves(monkeypatch: pytest.MonkeyPatch, size_bytes: int, free_bytes: int, room: bool) -> None:
    disk = SimpleNamespace(f_frsize=4096, f_blocks=size_bytes // 4096, f_bavail=free_bytes // 4096)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: disk)
    assert logs.has_room(0) is room
