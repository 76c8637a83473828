"""The command line: bad input ends with exit code 2 and one message that names field, value and reason, before any process starts."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fleet as package
from actors.coordinator import Coordinator
from fleet.app.cli import main as cli
from fleet.app.configuration import every
from fleet.host import secret
from fleet.host.clock import MonotonicClock
from fleet.host.journal import JournalWriter
from fleet.host.processes import calling
from fleet.machine.core import FleetMachine
from fleet.settings.live import ADDRESS_FILE, LIVE
from fleet.settings.run import RunSettings
from policies import placement
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow
from storage.checkpoint.parts import RetainingStore
from tests.golden.journals import one_loss

GOOD = "def train(run):\n    pass\n"
VERBS, OPTIONS, SETTINGS = 15, 25, 90
"""At most so many lines of ``fleet --help``, lines of ``fleet run --help``, and rows of docs/settings.md."""


@dataclass
class Done:
    returncode: int
    stderr: str


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command, run here in an empty folder; what it would start, it may not reach."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fleet", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(int(ended.value.code or 0), capsys.readouterr().err)

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--world", "0"), ("world", "0", "at least 1")),
        (("--world", "4", "--shards", "2"), ("shards", "2", "fewer batch shards than ranks")),
        (("--spares", "-1"), ("spares", "-1")),
        (("--min-ranks", "9"), ("min_ranks", "9", "could never start")),
        (("--config", "reduction=fast"), ("reduction", "fast", "tree")),
        (("--chaos", "mtbf=0s"), ("mtbf", "0")),
        (("--chaos", "mtbf=-3s"), ("mtbf", "-3")),
        (("--chaos", "kinds=meteor,mtbf=9s"), ("kinds", "meteor")),
        (("--chaos", "nonsense=1"), ("nonsense",)),
        (("--checkpoint", "sometimes"), ("checkpoint", "sometimes")),
        (("--config", "timeouts.heartbeat_s=7"), ("timeouts.quiesce_s", "must be greater than timeouts.heartbeat_s = 7", "Sane is")),
        (("--config", "timeouts.progress_s=900"), ("timeouts.collective_s", "must be greater than timeouts.progress_s = 900")),
        (("--config", "timeouts.run_s=60"), ("timeouts.run_s", "must be greater than timeouts.collective_s")),
        (("--set", "steps"), ("--set", "steps", "key=value")),
        (("--expect", "bliss>1"), ("--expect", "bliss", "Known: twin, status, goodput")),
        (("--expect", "twin"), ("--expect", "twin", "Add --twin")),
        (("--resume", "no-such-run"), ("--resume", "no-such-run", "journal.jsonl")),
    ],
)
def test_an_impossible_setting_is_refused_by_name(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, fleet: Callable[..., Done]
) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    done = fleet("run", "good.py", *arguments)
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stderr.split())
    assert all(word in said for word in words), said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n", ("no function train",)),
        ("def train():\n    pass\n", ("cannot be called with the run alone",)),
        ("raise ValueError('a bug on import')\n", ("it raises when it is executed", "a bug on import", "line 1")),
        ("import nowhere_to_be_found\n", ("ModuleNotFoundError", "nowhere_to_be_found")),
    ],
)
def test_a_script_that_cannot_train_is_refused(source: str, words: tuple[str, ...], tmp_path: Path, fleet: Callable[..., Done]) -> None:
    (tmp_path / "bad.py").write_text(source)
    done = fleet("run", "bad.py")
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "importlib" not in done.stderr


def test_a_missing_script_is_refused(fleet: Callable[..., Done]) -> None:
    done = fleet("run", "nowhere.py")
    assert done.returncode == 2
    assert "no such file" in done.stderr


@pytest.mark.parametrize("name", ["actors", "chaos"])
def test_a_package_of_ours_that_is_shadowed_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / f"{name}.py").write_text("")
    python, *rest = calling("fleet.app.cli.main", "main", "run", "good.py")
    command = [python, "-P", *rest]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"shadows Fleet's own package '{name}'" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", ["actors", "chaos"])
def test_another_package_of_such_a_name_is_named_before_it_is_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('it was loaded')\n")
    where = os.pathsep.join([str(tmp_path), str(Path(package.__file__).parents[1])])
    command = [sys.executable, "-S", "-m", "fleet", "runs"]  # no way to our packages but by the path
    done = subprocess.run(command, check=False, cwd=tmp_path, env={"PYTHONPATH": where}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"package = '{name}': Python finds {tmp_path}" in done.stderr


def test_the_version_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"fleet {package.__version__}\n")


def test_the_package_lists_what_it_offers() -> None:
    assert {"Run", "Step", "__version__"} <= set(dir(package))


def test_a_report_of_nothing_is_refused(fleet: Callable[..., Done]) -> None:
    done = fleet("report", "nothing")
    assert done.returncode == 2
    assert "neither ./nothing nor runs/nothing has a journal.jsonl" in done.stderr


@contextmanager
def coordinator(folder: Path) -> Iterator[None]:
    """One that answers as every run's does, and that ``fleet runs set`` finds in ``folder``."""
    settings = RunSettings()
    machine = FleetMachine(settings, ReformPromoteRegrow(settings.budgets, settings.timeouts.start_s), placement, CheckpointInterval())
    folder.mkdir()
    (folder / "journal.jsonl").touch()
    journal = JournalWriter(folder / "journal.jsonl")
    asked = Coordinator(machine, MonotonicClock(), journal, RetainingStore(f"file://{folder}", 3), print, folder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(asked.start("127.0.0.1", 0), loop).result(20)
        (folder / ADDRESS_FILE).write_text(f"127.0.0.1:{port}")
        secret.keep(folder, secret.held())
        yield
    finally:
        asyncio.run_coroutine_threadsafe(asked.stop(), loop).result(20)
        journal.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def test_what_a_run_refuses_to_set_is_said_in_whole_sentences(tmp_path: Path, fleet: Callable[..., Done]) -> None:
    with coordinator(tmp_path / "goes-on"):
        said = fleet("runs", "set", "goes-on", "straggler.nonsense=1").stderr
        way_out = f"Settings that can: {', '.join(sorted(LIVE))}."
        assert f"straggler.nonsense = '1': there is no such setting. {way_out}\n" in said
        said = fleet("runs", "set", "goes-on", "checkpoint.interval_s=0").stderr
        assert "checkpoint.interval_s = '0': must be greater than 0 s.\n" in said


def test_a_run_that_ends_at_its_pause_was_paused_and_one_that_has_ended_is_not(tmp_path: Path, fleet: Callable[..., Done]) -> None:
    """It has taken no step: there is nothing to keep, and it ends as it is told."""
    with coordinator(tmp_path / "goes-on"):
        done = fleet("stop", "goes-on")
        assert done.returncode == 0, done.stderr
        done = fleet("stop", "goes-on")
        assert done.returncode == 2 and "the run has ended" in done.stderr


def test_a_setting_of_a_run_that_does_not_go_on_is_refused(tmp_path: Path, fleet: Callable[..., Done]) -> None:
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "journal.jsonl").touch()
    done = fleet("runs", "set", "over", "straggler.gain=0.2")
    assert done.returncode == 1 and "no coordinator answers" in done.stderr
    done = fleet("runs", "set", "over", "straggler.gain")
    assert done.returncode == 2 and "not of the form key=value" in done.stderr


# ---- what is typed -----------------------------------------------------------------------------------------------------------------------


def shown(*arguments: str) -> list[str]:
    """Names that a help text prints: of commands, or of options."""
    text = CliRunner().invoke(cli.app, arguments, catch_exceptions=False).output
    return re.findall(r"^│ (--[a-z-]+|[a-z]+) ", text, re.M)


def test_help_is_short() -> None:
    verbs = [name for name in shown("--help") if not name.startswith("--")]
    assert verbs and len(verbs) <= VERBS
    options = [name for name in shown("run", "--help") if name.startswith("--")]
    assert {"--world", "--help-all"} <= set(options) and len(options) <= OPTIONS
    assert sum(not name.startswith("chaos.") for name in every()) <= SETTINGS, "beside those that --chaos takes as one"


def test_all_options_are_in_the_long_help_and_those_left_out_are_settings() -> None:
    run: Any = get_command(cli.app).commands["run"]  # type: ignore[attr-defined]
    named = {option.opts[0] for option in run.params if option.opts[0].startswith("--")}
    assert named <= set(shown("run", "--help-all"))
    assert not {"--recovery", "--max-world", "--grace"} & named


def test_a_run_of_nothing_says_what_to_type(fleet: Callable[..., Done]) -> None:
    done = fleet("run")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 3
    assert all(line.startswith("fleet run ") for line in done.stderr.splitlines())
    assert "SCRIPT" in fleet("run", "--world", "2").stderr


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    shim = tmp_path / "fleet"
    shim.write_text(f"#!{sys.executable}\nfrom fleet.app.cli.main import main\nmain()\n")
    shim.chmod(0o755)
    program = """
    eval "$(_FLEET_COMPLETE=source_bash fleet)"
    complete -p fleet
    try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fleet_completion fleet; echo "${COMPREPLY[@]}"; }
    try fleet re; try fleet runs s; try fleet run --wor
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    done = subprocess.run(["bash", "-c", program], check=True, env=environment, capture_output=True, text=True, timeout=120)
    bound, *found = done.stdout.splitlines()
    assert bound.endswith("-F _fleet_completion fleet") and found == ["report", "set show", "--world"]


def test_a_run_of_this_machine_that_has_ended_is_not_stopped(tmp_path: Path, fleet: Callable[..., Done]) -> None:
    (tmp_path / "runs" / "over").mkdir(parents=True)
    journal = JournalWriter(tmp_path / "runs" / "over" / "journal.jsonl")
    for record in one_loss().records:
        journal.append(record)
    journal.close()
    done = fleet("stop", "over")
    assert done.returncode == 2 and "the run has ended. Go on from its last step: fleet run --resume over" in " ".join(done.stderr.split())
