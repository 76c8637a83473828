"""Commands that only look at a run end at a signal, and nobody else hears of it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.app import plans
from fleet.app.cli.main import app
from fleet.errors import OutOfSight
from fleet.host.follow import Follower
from fleet.protocol.exit_codes import Exit
from fleet.protocol.journal import encode_line
from fleet.protocol.records import Committed
from fleet.protocol.types import StateId
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


# ---- a folder that is deleted, or copied ------------------------------------------------------------------------------------------------


MIRRORS = PROGRAM.replace(
    "    new = True\n",
    "    def pull(self):\n"
    "        from fleet.host.mirroring import RUN, pieces\n\n"
    "        return self._copies.take(pieces(Path('there'), RUN, self._copies.known)) > 0\n",
).replace(
    "    def pull(self):\n        self.new, new = False, self.new\n        return new\n",
    "",
)
"""The cluster's folder of the run is ``there``."""


def deleted_at(seen: str, folder: Path, program: str, *arguments: str) -> tuple[int, str]:
    """The command's exit code and words, when the run's folder here was deleted behind the line that has ``seen`` in it."""
    process = begin([sys.executable, "-c", program, *arguments], folder, os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if seen in line:
            shutil.rmtree(folder / "runs" / NAME)
            break
    if (folder / "there").exists():
        with (folder / "there" / JOURNAL).open("a") as journal:
            journal.write(journal_line())
    rest, _ = process.communicate(timeout=60)
    return process.returncode, " ".join((said + rest).split())


def journal_line() -> str:
    return encode_line(Committed(StateId(0, 1), 100.0)).decode()


@pytest.mark.parametrize(("command", "seen"), [(("runs", "watch", NAME), "http://127.0.0.1"), (("logs", NAME, "--follow"), "trains")])
def test_a_look_at_a_folder_that_is_deleted_ends_and_says_so(tmp_path: Path, command: tuple[str, ...], seen: str) -> None:
    begun(tmp_path)
    code, said = deleted_at(seen, tmp_path, PROGRAM, *command)
    assert code == Exit.UNSEEN and "was deleted while it was looked at; the run itself may go on" in said
    assert "Traceback" not in said


def test_so_it_is_with_the_copy_of_a_run_of_a_cluster(tmp_path: Path) -> None:
    """It was made anew, with a hole in place of what had come before."""
    begun(tmp_path)
    (tmp_path / "runs" / NAME).rename(tmp_path / "there")
    code, said = deleted_at("watch it at", tmp_path, MIRRORS, "attach", NAME, "--address", "auto")
    assert code == Exit.UNSEEN and "was deleted while it was looked at" in said, said
    assert not (tmp_path / "runs" / NAME / JOURNAL).exists()


@pytest.mark.parametrize(
    "command", [("report", NAME), ("report", NAME, "--why", "0"), ("report", NAME, "--post-mortem", "-"), ("status", NAME)]
)
def test_one_look_at_a_folder_that_is_deleted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    begun(tmp_path)

    def found(name: str, root: Path) -> Path:
        shutil.rmtree(tmp_path / "runs" / NAME)
        return tmp_path / "runs" / NAME

    monkeypatch.setattr(plans, "find_run", found)
    done = CliRunner().invoke(app, [*command, "--storage", str(tmp_path / "runs")])
    assert isinstance(done.exception, OutOfSight) and "was deleted while it was looked at" in str(done.exception), done.exception


def test_the_page_says_that_a_folder_was_deleted(tmp_path: Path) -> None:
    follower = Follower(begun(tmp_path)).read()
    assert (not follower.damage and follower.now_s() is not None) or follower.silent()
    shutil.rmtree(tmp_path / "runs" / NAME)
    follower.poll()
    assert "was deleted while it was looked at" in follower.damage and follower.now_s() is None and not follower.silent()


@pytest.mark.parametrize("command", ["report", "status", "logs"])
def test_a_copy_is_named(tmp_path: Path, command: str) -> None:
    begun(tmp_path)
    shutil.copytree(tmp_path / "runs" / NAME, tmp_path / "runs" / "other")
    done = CliRunner().invoke(app, [command, "other", "--storage", str(tmp_path / "runs")])
    assert done.exit_code == 0 and "is a copy of run run: it ends where it was copied" in " ".join(done.output.split())
    assert "is a copy" not in CliRunner().invoke(app, [command, NAME, "--storage", str(tmp_path / "runs")]).output
