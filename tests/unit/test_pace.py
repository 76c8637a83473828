"""`make pace`: which commits can be compared, how ranks are let through block by block, and what is called slower."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import pace_sides
from benchmarks.pace import figures, slower
from benchmarks.pace_sides import NoSuchCommit, StepGate, checkout
from benchmarks.peers.common import REPOSITORY

NAMED = '[project]\nname = "x"\nversion = "1"\n[project.scripts]\nfleet = "x:main"\n'
BROKEN = NAMED + "[build-system]\nrequires = 3\n[tool.setuptools]\npackages = 7\n"


def committed(folder: Path, pyproject: str) -> str:
    """A commit with this file in a repository of its own; its name."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(folder)]
    if not (folder / ".git").exists():
        subprocess.run([*git, "init", "-q"], check=True)
    (folder / "pyproject.toml").write_text(pyproject)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("pyproject", "why"), [("", "has no command `fleet`"), (BROKEN, "does not build: ")], ids=["no command", "does not build"]
)
def test_a_commit_that_cannot_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pyproject: str, why: str) -> None:
    (tmp_path / "repository").mkdir()
    commit = committed(tmp_path / "repository", pyproject)
    monkeypatch.setattr(pace_sides, "REPOSITORY", tmp_path / "repository")
    with pytest.raises(NoSuchCommit, match=f"BASE = {commit} {why}"):
        checkout(commit, tmp_path / "places")


def test_a_commit_that_builds_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository").mkdir()
    commit = committed(tmp_path / "repository", NAMED)
    monkeypatch.setattr(pace_sides, "REPOSITORY", tmp_path / "repository")
    place = checkout(commit, tmp_path / "places")
    (place / "mark").touch()
    assert checkout(commit[:9], tmp_path / "places") == place
    assert (place / "mark").exists()


def test_the_command_ends_with_2_for_a_commit_that_is_not_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pace", "no-such-commit"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]  # torch may warn of a package before
    assert last == "pace: BASE = no-such-commit: git knows no such commit. Name one that `git log` shows, or fetch it."


def test_ranks_stand_at_the_gate_until_their_block_is_granted(tmp_path: Path) -> None:
    gate = StepGate(tmp_path / "gate")
    passed = threading.Event()

    def rank(pid: int) -> None:
        with socket.socket(socket.AF_UNIX) as gate:
            gate.connect(str(tmp_path / "gate"))
            for block in range(3):
                gate.sendall(f"{block} {pid}\n".encode())
                gate.recv(1)
        passed.set()

    ranks = [threading.Thread(target=rank, args=(pid,)) for pid in (1, 2)]
    for each in ranks:
        each.start()
    gate.stand(1, 2)  # block 0 begins by itself
    gate.grant(1)
    at_s = gate.stand(2, 2)
    assert not passed.is_set()
    assert gate.halt() == 2
    for each in ranks:
        each.join(10)
    assert passed.is_set()
    assert at_s > 0
    gate.close()


def test_slower_is_what_lies_beyond_the_bound_with_its_whole_interval() -> None:
    samples = {
        "step_ms_4_ranks": [(100.0, 103.0 + number / 10) for number in range(6)],
        "cpu_us_4_ranks": [(100.0, 100.0 + 3.0 * (number % 2)) for number in range(6)],
        "storm_samples": [(100.0, 97.0)] * 3,
        "stall_s": [(0.1, 0.05)] * 3,
        "start_s": [(10.0, 20.0)],
    }
    found = figures(samples)
    assert found["stall_s_ratio"] == pytest.approx(0.5)
    assert (found["step_ms_4_ranks_old"], found["step_ms_4_ranks_new"]) == (100.0, pytest.approx(103.25))
    assert slower(found) == ["step_ms_4_ranks", "storm_samples"]
