"""Commands that only look at a run end at a signal, and nobody else hears of it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from fleet.protocol.exit_codes import Exit
from fleet.settings.live import ADDRESS_FILE
from tests.support.journals import NAME as JOURNAL
from tests.support.journals import write_begun
from tests.support.processes import begin

ROOT = Path(__file__).resolve().parents[2]
NAME, LATE_UNIX_S = "run", 4e9
PROGRAM = """
import sys
from contextlib import nullcontext
from pathlib import Path

from actors.supervisor import DriverStanding
from fleet.app import remote


class GoesOn(remote.RemoteRun):
    def standing(self):
        return DriverStanding(str(self.folder), 7, 0, None, None)

    new = True

    def pull(self):
        self.new, new = False, self.new
        return new

    def touched(self, *words):
        Path("touched").write_text(f"{words}")

    stop = ask = leave = touched


remote.connected = lambda address: nullcontext()
remote.find = lambda name, root: GoesOn(name, root / name, None)
from fleet.app.cli.main import main

sys.argv = ["fleet", *sys.argv[1:]]
main()
"""
"""The command line, of which the cluster has a run that goes on for ever."""


def begun(folder: Path) -> Path:
    """Its journal: the run goes on, and a rank has printed a line."""
    run = folder / "runs" / NAME
    logs = run / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.0.log").write_text("trains\n")
    write_begun(run)
    return run / JOURNAL


def ended_at(number: int, seen: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """The command's exit code and words, when a signal came behind the line that has ``seen`` in it."""
    process = begin([sys.executable, "-c", PROGRAM, *arguments], folder, os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if seen in line:
            process.send_signal(number)
            break
    rest, _ = process.communicate(timeout=60)
    return process.returncode, " ".join((said + rest).split())


@pytest.mark.parametrize(
    ("number", "seen"), [(signal.SIGINT, "watch it at"), (signal.SIGTERM, "watch it at"), (signal.SIGHUP, "has not begun yet")]
)
def test_a_signal_ends_attach_alone_and_it_says_what_would_end_the_run(number: int, seen: str, tmp_path: Path) -> None:
    if seen == "watch it at":
        begun(tmp_path)
    code, said = ended_at(number, seen, tmp_path, "attach", NAME, "--address", "10.0.0.1:6379")
    assert code == Exit.UNSEEN, said
    assert "fleet stop run --address 10.0.0.1:6379 would end the run" in said
    assert not (tmp_path / "touched").exists()


def test_so_it_is_with_what_follows_the_prints_of_ranks(tmp_path: Path) -> None:
    begun(tmp_path)
    code, said = ended_at(signal.SIGTERM, "trains", tmp_path, "logs", NAME, "--follow", "--address", "auto")
    assert code == Exit.UNSEEN and "fleet stop run would end the run" in said
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_page_is_served_until_a_signal(number: int, tmp_path: Path) -> None:
    journal = begun(tmp_path)
    before = journal.read_bytes()
    assert ended_at(number, "http://127.0.0.1", tmp_path, "runs", "watch", NAME)[0] == Exit.DONE
    assert journal.read_bytes() == before


def test_what_was_begun_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    """As by ``nohup``: SIGHUP is ignored from the beginning, and only the next signal ends it."""
    begun(tmp_path)
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PROGRAM}"
    process = begin([sys.executable, "-c", program, "runs", "watch", NAME], tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout is not None and "http://127.0.0.1" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == Exit.DONE


def test_one_of_this_machine_is_told_where_it_is_seen(tmp_path: Path) -> None:
    """No cluster is there: Ray would be asked for minutes, or say less."""
    journal = begun(tmp_path)
    os.utime(journal, (LATE_UNIX_S, LATE_UNIX_S))  # it grows, however slow this machine is
    (journal.parent / ADDRESS_FILE).write_text("127.0.0.1:1")
    command = [sys.executable, "-m", "fleet", "attach", NAME, "--address", "127.0.0.1:1"]
    process = begin(command, tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    said, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.REFUSED
    assert "belongs to no cluster" in said and "fleet stop run ends it" in " ".join(said.split())
