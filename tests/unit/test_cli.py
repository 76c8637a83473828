"""The command line: bad input ends with exit code 2 and one message that names field, value and reason, before any process starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleet import cli
from fleet.launch.processes import calling

GOOD = "def train(run):\n    pass\n"


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
        (("--reduction", "fast"), ("reduction", "fast", "tree")),
        (("--chaos", "mtbf=0s"), ("mtbf", "0")),
        (("--chaos", "mtbf=-3s"), ("mtbf", "-3")),
        (("--chaos", "mtbf=50ms,step=50ms"), ("mtbf", "nothing could commit")),
        (("--chaos", "kinds=meteor,mtbf=9s"), ("kinds", "meteor")),
        (("--chaos", "nonsense=1"), ("nonsense",)),
        (("--checkpoint", "sometimes"), ("checkpoint", "sometimes")),
        (("--timeout", "heartbeat_s=7"), ("timeouts.park_s", "must be greater than timeouts.heartbeat_s = 7", "Sane is")),
        (("--timeout", "progress_s=900"), ("timeouts.collective_s", "must be greater than timeouts.progress_s = 900")),
        (("--timeout", "run_s=60"), ("timeouts.run_s", "must be greater than timeouts.collective_s")),
        (("--timeout", "patience=3"), ("patience", "no such time-out", "heartbeat_s")),
        (("--set", "steps"), ("--set", "steps", "key=value")),
        (("--resume", "no-such-run"), ("RUN", "no-such-run", "journal.jsonl")),
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
        ("raise ValueError('a bug on import')\n", ("it raises when it is imported", "a bug on import", "line 1")),
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
    python, *rest = calling("fleet.cli", "main", "run", "good.py")
    command = [python, "-P", *rest]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"shadows Fleet's own package '{name}'" in " ".join(done.stderr.split())


def test_a_report_of_nothing_is_refused(fleet: Callable[..., Done]) -> None:
    done = fleet("report", "nothing")
    assert done.returncode == 2
    assert "no journal.jsonl" in done.stderr


def test_a_setting_of_a_run_that_does_not_go_on_is_refused(tmp_path: Path, fleet: Callable[..., Done]) -> None:
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "journal.jsonl").touch()
    done = fleet("set", "over", "straggler.gain=0.2")
    assert done.returncode == 1 and "no coordinator answers" in done.stderr
    done = fleet("set", "over", "straggler.gain")
    assert done.returncode == 2 and "not of the form key=value" in done.stderr
