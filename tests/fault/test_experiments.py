"""An experiment on a real cluster is held, and one whose fault strikes nobody is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet.protocol.records import Committed, FaultRecord, Record, RunEnded, ViewPublished
from tests.support.journals import records
from tests.support.processes import begin
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
LIMIT_S = 280.0
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


def written(folder: Path, name: str, fault: dict[str, Any], how: str = WHOLE) -> list[str]:
    """The command for an experiment that is shipped, on a small script, with this fault; ``how`` Fleet is broken in its ranks."""
    (folder / "small.py").write_text(how + SCRIPT)
    experiment = json.loads((ROOT / f"experiments/{name}.json").read_text())
    arguments = experiment["method"][0]["provider"]["arguments"]
    arguments |= {"script": "small.py", "options": {}, "shards": 8, "faults": [{"at_s": 2} | fault]}
    for probe in experiment["steady-state-hypothesis"]["probes"]:
        if probe["name"] == "goodput while it trains":
            probe["tolerance"]["range"] = [0.01, 1.0]
    (folder / "experiment.json").write_text(json.dumps(experiment))
    return [sys.executable, "-m", "fleet", "experiment", "run", "experiment.json", "--json", "verdicts.json"]


def carried_out(folder: Path, name: str, fault: dict[str, Any], how: str = WHOLE) -> tuple[int, dict[str, Any]]:
    """Exit code and verdicts of that experiment."""
    command = written(folder, name, fault, how)
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
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


# ---- cut off -----------------------------------------------------------------------------------------------------------------------------


def steps(count: int) -> Callable[[list[Record]], bool]:
    return lambda seen: any(isinstance(record, Committed) and record.state.step >= count for record in seen)


def has(kind: type[Record]) -> Callable[[list[Record]], bool]:
    return lambda seen: any(isinstance(record, kind) for record in seen)


def was_hit(seen: list[Record]) -> bool:
    return any(isinstance(record, FaultRecord) and record.phase == "executed" for record in seen)


MOMENTS = {
    "begins": ("", lambda seen: True), "has a journal": ("run", bool), "has a view": ("run", has(ViewPublished)),
    "step 1": ("run", steps(1)), "step 9": ("run", steps(9)), "the fault struck": ("run", was_hit), "step 120": ("run", steps(120)),
    "has ended": ("run", has(RunEnded)), "its twin has a view": ("twin", has(ViewPublished)), "step 9 of its twin": ("twin", steps(9)),
}  # fmt: skip
"""When -> of which run (none: of the command itself), and what its journal has then."""


def reached(folder: Path, moment: str) -> bool:
    where, has_come = MOMENTS[moment]
    journals = list(folder.glob("runs/*/twin" if where == "twin" else "runs/*")) if where else []
    return has_come([]) if not where else any((one / "journal.jsonl").exists() and has_come(list(records(one))) for one in journals)


WAYS = {"INT": (INT,), "TERM": (TERM,), "KILL": (KILL,), "INT twice": (INT, INT)}
"""The command is also the driver of its run: to kill one is to kill the other."""
IN_TURN = cycle(["INT", "TERM", "KILL", "TERM", "INT twice"])
CUTS = [(moment, next(IN_TURN)) for moment in MOMENTS for _ in range(2)]


@pytest.mark.parametrize(("moment", "way"), CUTS, ids=lambda word: word.replace(" ", "-"))
def test_an_experiment_that_is_cut_off_never_says_violated(tmp_path: Path, moment: str, way: str) -> None:
    """It would be held. Nothing of it is left running."""
    command = written(tmp_path, "rank-dies", {"kind": "kill_rank", "slot": 1})
    mark = {"FLEET_TEST_OF": str(tmp_path)}
    with (tmp_path / "said.txt").open("w") as output:
        process = begin(command, tmp_path, ENVIRONMENT | mark, stdout=output, start_new_session=True)
    until(lambda: process.poll() is not None or reached(tmp_path, moment), moment, LIMIT_S)
    assert process.poll() is None, (tmp_path / "said.txt").read_text()
    for number in WAYS[way]:
        if number == INT:  # Ctrl-C reaches all processes of the terminal
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    code, said = process.wait(LIMIT_S), (tmp_path / "said.txt").read_text()
    verdicts = tmp_path / "verdicts.json"
    reported = verdicts_of(json.loads(verdicts.read_text())) if verdicts.exists() else {}
    assert code and "violated" not in said and "violated" not in reported.values(), said[-3000:]
    assert "the method came to no end" not in said, said[-3000:]
    until(lambda: not marked(mark), "nothing of it is left running", LIMIT_S)


def marked(mark: dict[str, str]) -> list[int]:
    """Processes with ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and mark.items() <= process.environ().items():
                found.append(process.pid)
    return found
