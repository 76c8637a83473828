"""Ranks and Ray's GPUs: each rank has its own, and so has who replaces one that was killed. Ray's GPUs are numbers: no device is needed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from chaos.arrivals import save_trace
from fleet.errors import ConfigError
from fleet.protocol.records import ProcessLost, ProcessUp
from fleet.protocol.types import Fault, Member
from tests.support.journals import records
from tests.support.processes import begin
from tests.support.terminal import ROOT

SCRIPT = """
import os
from pathlib import Path
from tests.support import trains

def train(run):
    given = os.environ["CUDA_VISIBLE_DEVICES"]
    (Path(run.options["flags"]) / f"{run.slot}.{os.getpid()}").write_text(given)
    print("device", run.device if not given else f"of GPU {given}")
    trains.plain(run)
"""
GPUS = ["3", "5", "6", "7"]
COMMAND = (sys.executable, "-m", "fleet", "run", "script.py", "--world", "3", "--spares", "1", "--nodes", "2", "--gpus-per-rank")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ",".join(GPUS)}


def test_each_rank_has_its_own_gpu_and_so_has_who_replaces_it(tmp_path: Path, environment: dict[str, str]) -> None:
    save_trace((Fault("f1", 2.0, "gpu", "kill_rank", slot=1),), tmp_path / "faults.csv")
    flags = tmp_path / "flags"
    flags.mkdir()
    options = ("--set", f"flags={flags}", "--set", "steps=60", "--set", "pause_s=0.2", "--set", "norm=layer", "--shards", "8")
    run = begin([*COMMAND, "1", *options, "--name", "run", "--chaos", "trace=faults.csv"], tmp_path, environment)
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said[-3000:]
    given = {path.name: path.read_text() for path in flags.iterdir() if "." in path.name}
    kept = records(tmp_path / "runs" / "run")
    processes = {each.member: f"{each.member.slot}.{each.process.pid}" for each in kept if isinstance(each, ProcessUp)}
    lost = {each.member for each in kept if isinstance(each, ProcessLost)}
    assert lost == {Member(1, 0)} and Member(1, 1) in processes, "it was killed, and replaced"
    assert given.keys() == set(processes.values())
    alive = [given[processes[member]] for member in processes if member not in lost]
    assert sorted(alive) == GPUS, "one for each, and no two the same"
    assert {given[processes[Member(slot, 0)]] for slot in range(4)} == set(GPUS)


def test_too_few_gpus_are_refused_before_anything_starts(tmp_path: Path, environment: dict[str, str]) -> None:
    run = begin([*COMMAND, "2"], tmp_path, environment)
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 2 and not (tmp_path / "runs").exists(), said
    assert "per_rank.gpus" in said and "room for 2 ranks; 3 ranks and 1 spares were asked for" in " ".join(said.split())
    assert ConfigError.__name__ not in said and "Traceback" not in said
