"""``fleet init``: it writes a script that can be loaded, and overwrites nothing. tests/fault/test_guide.py trains with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.rank.script_loading import load_train
from fleet.app.cli.main import app
from fleet.app.cli.run import checked
from fleet.errors import ConfigError
from tests.support.blocks import ROOT, command_lines


def init(*words: str) -> str:
    result = CliRunner().invoke(app, ["init", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_writes_a_script_that_loads_and_prints_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = [line.split() for line in command_lines(init("mine.py")) if line.strip().startswith("fleet ")]
    assert callable(load_train("mine.py"))
    assert len(commands) == 2
    for _, run, script, *options in commands:
        assert (run, script) == ("run", "mine.py")
        checked(script, [option.strip('"') for option in options], tmp_path)


@pytest.mark.timeout(120)
def test_the_plain_script_trains_and_goes_on_from_its_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command that it prints, twice. tests/fault/test_guide.py does the second one."""
    monkeypatch.chdir(tmp_path)
    said = init("mine.py", "--plain")
    torchrun = next(line.split() for line in said.splitlines() if line.strip().startswith("torchrun"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun[1:], "--save-every", "2", "--steps"]
    first, second = (subprocess.run([*command, steps], capture_output=True, text=True, timeout=60, check=True).stdout for steps in "46")
    assert "goes on" not in first and "rank 1 goes on from step 4" in second


@pytest.mark.parametrize("words", [[], ["--plain"]])
def test_what_it_writes_keeps_the_rules_of_this_project(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init(*words)
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("file", "reason"), [("there.py", "lost"), ("train.txt", "Python file"), ("none/train.py", "no folder none")])
def test_what_it_cannot_write_is_refused(file: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("mine")
    with pytest.raises(ConfigError, match=reason):
        init(file)
    assert (tmp_path / "there.py").read_text() == "mine"
