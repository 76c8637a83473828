"""``fleet experiment scale`` with real ranks: what it says of a world stands in its file before that world is trained with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.app.quota import Quotas
from fleet.errors import ConfigError
from fleet.host.journal import read_journal
from fleet.host.processor_time import cores_of_host, own_group
from fleet.ledger.step_terms import TERMS
from fleet.planning.measured import read_measured
from fleet.protocol.records import RunEnded, RunStarted, Spans
from tests.support.launched import ROOT

LIMIT_S = 400.0
JOB = """
import torch

def train(run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(256, 32)
    data = [(x[i], x[i].sum().reshape(1)) for i in range(256)]
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=1_000_000):
        for a, b in step.batches(data, batch_size=128, tokens=32):
            step.backward(((model(a) - b) ** 2).mean())
        step.commit()
"""


def scaled(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(JOB)
    line = [
        sys.executable,
        "-m",
        "fleet",
        "experiment",
        "scale",
        "job.py",
        "--worlds",
        "1,2,3,4",
        "--hold-out",
        "4",
        "--seconds",
        "3",
        "--rounds",
        "1",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*line, *more], check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def part() -> tuple[str, ...]:
    """What the host needs for four ranks."""
    return () if cores_of_host() >= 4 else ("--cpu-quota", f"{int(22.5 * cores_of_host()) / 100:g}")


@pytest.mark.timeout(450)
def test_a_world_is_predicted_and_then_measured(tmp_path: Path) -> None:
    quota = part()
    try:
        before = _left() if quota and Quotas(float(quota[1])) else set()
    except ConfigError:
        refused = scaled(tmp_path, *quota)
        assert refused.returncode == 2 and "--cpu-quota" in refused.stderr and not (tmp_path / "scale.json").exists()
        return
    ended = scaled(tmp_path, *quota, "--config", "cost.usd_per_rank_hour=2")
    assert ended.returncode == 0, ended.stderr
    reported = json.loads((tmp_path / "scale.json").read_text())
    assert [visit["world"] for visit in reported["visits"]] == [1, 2, 3, 4]
    for visit in reported["visits"]:
        assert set(visit["terms"]) == set(TERMS) and visit["terms"]["compute"] > 0 and visit["steps"] >= 10
        records = list(read_journal(tmp_path / "runs" / visit["run"] / "journal.jsonl"))
        assert [record.status for record in records if isinstance(record, RunEnded)] == ["stopped"]
        assert {record.member.slot for record in records if isinstance(record, Spans)} == set(range(visit["world"]))
    assert reported["visits"][0]["terms"]["wait"] == 0 < reported["visits"][-1]["terms"]["exchange"]
    begun = next(iter(read_journal(tmp_path / "runs" / reported["visits"][-1]["run"] / "journal.jsonl")))
    assert isinstance(begun, RunStarted) and reported["prediction"]["unix_s"] < begun.unix_time_s
    assert reported["prediction"]["law"]["worlds"] == [1, 2, 3] and reported["law"]["worlds"] == [1, 2, 3, 4]
    low, high = reported["prediction"]["step_s"]["low"], reported["prediction"]["step_s"]["high"]
    assert reported["measured"]["inside"] == (low <= reported["measured"]["step_s"] <= high)
    assert reported["larger"]["price"]["money"] == "USD" and reported["larger"]["price"]["per_step"] == 128 * 32
    assert [row["world"] for row in reported["larger"]["rows"]] == [1, 2, 3, 4, 8, 16, 32]
    assert "world 4, not measured yet" in ended.stdout and "Adding ranks pays up to" in ended.stdout
    assert read_measured((tmp_path / "scale.json").read_text()).script == "job.py"
    assert not quota or _left() <= before


def _left() -> set[Path]:
    """Groups whose maker is gone."""
    return {group for group in own_group().glob("fleet-cpu-*") if not Path(f"/proc/{group.name.split('-')[2]}").exists()}


@pytest.mark.parametrize("arguments", [("--worlds", "1,2,64", "--hold-out", "64", "--config", "shards=64")])
def test_ranks_that_would_share_cores_are_refused_before_ray_starts(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    if cores_of_host() >= 64:
        arguments = ("--worlds", "1,2,4096", "--hold-out", "4096", "--config", "shards=4096")
    ended = scaled(tmp_path, *arguments)
    assert ended.returncode == 2 and "--cpu-quota" in ended.stderr and not (tmp_path / "runs").exists()
