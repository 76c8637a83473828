"""The example on a real object store: all of its ranks die at once, and it goes on from there to the bits of its fault-free twin.

And runs whose store takes nothing: no rank of them starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from fleet.app.cluster.local import LocalCluster
from fleet.app.plans import RunPlan
from fleet.app.recipes import LiveRun
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.host.processes import calling
from fleet.protocol.records import VERSION, HistoryBegun, ProcessLost, ProcessUp, Record, RunEnded, RunStarted
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.support import trains
from tests.support.journals import NAME, durable, records
from tests.support.processes import begin
from tests.support.seaweed import SeaweedServer
from tests.support.waiting import until

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
    command = calling("fleet.app.cli.main", "main", "run", str(ROOT / "examples/gpt.py"), *OPTIONS)
    command += ["--storage", s3.url("example"), "--json", str(report)]
    environment = os.environ | s3.environment | {"PYTHONPATH": str(ROOT)}
    process = begin(command, tmp_path, environment)
    until(lambda: process.poll() is not None or bool(durable(run_so_far(tmp_path))), "a checkpoint is durable", LIMIT_S)
    kill_all_ranks(run_so_far(tmp_path))
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    written, kept = json.loads(report.read_text()), run_so_far(tmp_path)
    assert written["twin"]["equal"], written["twin"]
    assert s3.secret not in said + report.read_text()
    assert [record.status for record in kept if isinstance(record, RunEnded)] == ["completed"]
    [rollback] = [record for record in kept if isinstance(record, HistoryBegun)]
    assert rollback.from_state in {record.state for record in durable(kept)}
    assert rollback.from_state.step > 0


def test_a_bucket_that_is_not_there_ends_the_command_before_a_run_begins(s3: SeaweedServer, tmp_path: Path) -> None:
    command = calling("fleet.app.cli.main", "main", "run", str(ROOT / "examples/gpt.py"), "--world", "1", "--nodes", "1")
    command += ["--storage", f"s3://{s3.key}:{s3.secret}@no-such-bucket/runs"]
    environment = os.environ | {"FLEET_S3_ENDPOINT": s3.endpoint, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "this machine could not write a small object there: bucket: NoSuchBucket" in done.stderr
    assert "Create the bucket, or correct its name." in done.stderr and "--storage = 's3://***@no-such-bucket/runs/gpt-" in done.stderr
    assert s3.secret not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert run_so_far(tmp_path) == []


@pytest.mark.parametrize("resume", [False, True])
def test_nodes_that_cannot_use_the_store_start_no_rank(cluster: LocalCluster, tmp_path: Path, resume: bool) -> None:
    """This process has not tried it. Of a run that was there before, the journal says why it stopped again."""
    folder = tmp_path / "refused"
    settings = RunSettings(world=1, nodes=3, storage="file:///proc/nope", checkpoint=CheckpointSettings(policy="fixed", interval_s=1.0))
    if resume:
        folder.mkdir()
        journal = JournalWriter(folder / NAME)
        journal.append(RunStarted(VERSION, "refused", 0.0, 0.0, 1, 0, 16, "{}"))
        journal.close()
    nodes = len(cluster.alive())
    with pytest.raises(
        ConfigError, match=rf"node \d+ \(and {nodes - 1} of the other {nodes - 1}\) could not write a small object there: folder"
    ):
        LiveRun(RunPlan(name="refused", folder=folder, settings=settings, train=trains.plain, resume=resume), cluster).execute()
    assert folder.exists() == resume
    kept = records(folder) if resume else []
    assert [(record.status, "could not write" in record.reason) for record in kept if isinstance(record, RunEnded)] == [
        ("stopped", True)
    ] * resume
    assert not [record for record in kept if isinstance(record, ProcessUp)]
