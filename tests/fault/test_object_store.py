"""The example on a real object store: all of its ranks die at once, and it goes on from there to the bits of its fault-free twin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from fleet.launch.processes import calling
from fleet.records import LineageBegun, ProcessLost, ProcessUp, Record, RunEnded
from tests.support.journals import NAME, durable, records
from tests.support.seaweed import SeaweedServer
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("clusters")

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--world", "2", "--nodes", "1", "--shards", "4", "--set", "steps=12", "--checkpoint", "2s", "--seed", "5", "--twin")
LIMIT_S = 240.0


def run_so_far(folder: Path) -> list[Record]:
    journals = [path for path in (folder / "runs").glob(f"*/{NAME}") if "twin" not in path.parent.name]
    return records(journals[0].parent) if journals else []


def kill_all_ranks(kept: list[Record]) -> None:
    dead = {record.member for record in kept if isinstance(record, ProcessLost)}
    alive = [record.process.pid for record in kept if isinstance(record, ProcessUp) and record.member not in dead]
    assert len(alive) == 2
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def test_the_example_resumes_from_s3_after_all_ranks_are_lost(s3: SeaweedServer, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = calling("fleet.cli", "main", "run", str(ROOT / "examples/gpt.py"), *OPTIONS)
    command += ["--store", s3.url("example"), "--json", str(report)]
    environment = os.environ | s3.environment | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: process.poll() is not None or bool(durable(run_so_far(tmp_path))), "a checkpoint is durable", LIMIT_S)
    kill_all_ranks(run_so_far(tmp_path))
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    written, kept = json.loads(report.read_text()), run_so_far(tmp_path)
    assert written["twin"]["equal"], written["twin"]
    assert s3.secret not in said + report.read_text()
    assert [record.status for record in kept if isinstance(record, RunEnded)] == ["completed"]
    [rollback] = [record for record in kept if isinstance(record, LineageBegun)]
    assert rollback.from_state in {record.state for record in durable(kept)}
    assert rollback.from_state.step > 0
