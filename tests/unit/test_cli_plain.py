"""``fleet run --plain``: what is refused, by name and with a way out, before any process starts; and what is made of the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.app import plans
from fleet.app.cli import main as cli
from fleet.app.comparisons import runs_named
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.ledger.verification import verification
from fleet.protocol.records import VERSION, RunStarted
from fleet.settings.run import RunSettings

Call = Callable[..., tuple[int, str]]
SCRIPT = "import torch\nprint('nothing of Fleet is in here')\n"


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """``fleet run --plain``, in a folder with a script; (exit code, what it says in one line)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(SCRIPT)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fleet", "run", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), " ".join(capsys.readouterr().err.split())

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job.py", "--spares", "1"], "--spares = 1"),
        (["job.py", "--twin"], "--twin = True"),
        (["job.py", "--address", "auto"], "--address = 'auto'"),
        (["job.py", "--resume", "old"], "--resume = 'old'"),
        (["job.py", "--repeat", "old"], "--repeat = 'old'"),
        (["job.py", "--verify", "0.1"], "--verify = 0.1"),
        (["job.py", "--optimizer-sharding", "fsdp"], "--optimizer-sharding = 'fsdp'"),
        (["job.py", "--config", "world=2"], "--config"),
        (["job.py", "--steps", "9"], "fleet run --plain train.py -- --steps 300"),
        (["job.py", "--set", "steps=9"], "fleet run --plain train.py -- --steps 300"),
        (["missing.py"], "SCRIPT = 'missing.py': no such file"),
        ([], "SCRIPT = '': missing"),
        (["job.py", "--world", "0"], "world = 0: must be at least 1"),
        (["job.py", "--world", "2", "--nodes", "3"], "--nodes = 3"),
        (["job.py", "--chaos", "mtbf=5s,kinds=kill_rank+flip_weight"], "chaos.kinds = 'flip_weight'"),
        (["job.py", "--chaos", "trace=none.csv"], "chaos.trace"),
        (["job.py", "--storage", "s3://bucket/runs"], "--storage = 's3://bucket/runs'"),
        (["job.py", "--name", "a/b"], "--name = 'a/b'"),
    ],
)
def test_what_means_nothing_for_a_script_as_it_is_is_refused_by_name(fleet: Call, tmp_path: Path, words: list[str], said: str) -> None:
    code, reported = fleet("--plain", *words)
    assert code == 2, reported
    assert said in reported
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_a_script_that_is_no_python_is_refused(fleet: Call, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def (\n")
    code, reported = fleet("--plain", "job.py")
    assert (code, "it is no Python" in reported) == (2, True), reported


def test_a_script_as_it_is_is_no_module(fleet: Call) -> None:
    code, reported = fleet("--plain", "job.py", "-m")
    assert code == 2
    assert "--module = True: a script that is not Fleet's does not know it" in reported


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The folder of a run of a script as it is."""
    folder = tmp_path / "runs" / "old"
    settings = RunSettings(world=2, shards=2)
    plan = plans.RunPlan(name="old", folder=folder, settings=settings, train=plans.elsewhere, script="job.py", plain=("--lr", "1 e"))
    config = plans.describe(plan)
    assert json.loads(config)["plain"] == ["--lr", "1 e"]
    writer = JournalWriter(plan.journal)
    writer.append(RunStarted(VERSION, "old", 1.0, 1.0, 2, 0, 2, config))
    writer.close()
    assert verification(RunStarted(VERSION, "old", 1.0, 1.0, 2, 0, 2, config), 2, 0.1) == {}, "Fleet verifies nothing there"
    return folder


@pytest.mark.parametrize("option", ["--resume", "--repeat"])
def test_a_run_of_a_script_as_it_is_is_not_continued_but_run_again(fleet: Call, ended: Path, option: str) -> None:
    code, reported = fleet(option, "old")
    assert code == 2, reported
    assert f"{option} = 'old'" in reported
    assert "fleet run --plain job.py -- --lr '1 e'" in reported


def test_runs_are_compared_by_their_names_and_policies_by_theirs(ended: Path) -> None:
    root = ended.parent
    assert runs_named(["old", "old"], root) == [ended, ended]
    assert runs_named(["in-place", "restart:daly"], root) == []
    assert runs_named(["unknown", "policies"], root) == []
    with pytest.raises(ConfigError, match="missing"):
        runs_named(["old", "missing"], root)
