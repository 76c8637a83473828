"""An experiment on a real cluster is held, and one whose fault strikes nobody is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import time
import torch

def train(run):
    broken(run)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    state = run.track(model=model, optimizer=optimizer)
    for step in run.steps(state, total=160):
        for batch in step.batches(data, batch_size=16):
            time.sleep(0.02)
            step.backward(model(batch).square().mean())
        step.commit()
"""


WHOLE = """
def broken(run):
    pass
"""
IMPURE = """
def broken(run):
    # What comes of a shard depends on which process computes it.
    import os
    from actors.rank.step.train_step import TrainStep
    pure = TrainStep.end_shard

    def end_shard(self, shard, loss):
        for parameter in self.parameters:
            parameter.grad.mul_(1.0 + os.getpid() % 97 / 1000)
        pure(self, shard, loss)

    TrainStep.end_shard = end_shard
"""
BLIND = """
def broken(run):
    # Ranks say that they hold the same, whatever they hold.
    from actors.rank.verify.replicas import Replicas
    Replicas._digest = lambda self, begin, end: 7
"""


def carried_out(folder: Path, name: str, fault: dict[str, Any], how: str = WHOLE) -> tuple[int, dict[str, Any]]:
    """Exit code and verdicts of an experiment that is shipped, on a small script, with this fault; ``how`` Fleet is broken in its ranks."""
    (folder / "small.py").write_text(how + SCRIPT)
    experiment = json.loads((ROOT / f"experiments/{name}.json").read_text())
    arguments = experiment["method"][0]["provider"]["arguments"]
    arguments |= {"script": "small.py", "options": {}, "shards": 8, "faults": [{"at_s": 2} | fault]}
    for probe in experiment["steady-state-hypothesis"]["probes"]:
        if probe["name"] == "goodput while it trains":
            probe["tolerance"]["range"] = [0.01, 1.0]
    (folder / "experiment.json").write_text(json.dumps(experiment))
    command = [sys.executable, "-m", "fleet", "experiment", "run", "experiment.json", "--json", "verdicts.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert (folder / "verdicts.json").exists(), done.stderr[-3000:]
    return done.returncode, json.loads((folder / "verdicts.json").read_text())


def verdicts_of(reported: dict[str, Any]) -> dict[str, str]:
    return {probe["probe"]: probe["verdict"] for probe in reported["probes"]}


@pytest.mark.parametrize(("slot", "code"), [(1, 0), (7, 1)])
def test_an_experiment_is_held_and_one_whose_fault_hits_nobody_is_not(tmp_path: Path, slot: int, code: int) -> None:
    ended, reported = carried_out(tmp_path, "rank-dies", {"kind": "kill_rank", "slot": slot})
    verdicts = verdicts_of(reported)
    assert ended == reported["exit_code"] == code, reported
    assert verdicts["its bits are those of a run without faults"] == "held"
    assert verdicts["the fault struck"] == ("held" if code == 0 else "violated")


@pytest.mark.parametrize(
    ("name", "kind", "how"),
    [
        pytest.param("rank-dies", "kill_rank", IMPURE, id="impure"),
        pytest.param("wrong-bits", "flip_weight", BLIND, id="blind"),
    ],
)
def test_a_fleet_that_is_broken_is_found_out(tmp_path: Path, name: str, kind: str, how: str) -> None:
    """The faults strike and the run completes; only who looks at the bits sees what is wrong."""
    ended, reported = carried_out(tmp_path, name, {"kind": kind, "slot": 1}, how)
    verdicts = verdicts_of(reported)
    assert ended == 1 and verdicts.pop("its bits are those of a run without faults") == "violated", reported
    assert verdicts["the run is completed"] == verdicts["the fault struck"] == "held"
