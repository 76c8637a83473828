"""``fleet run`` as a user calls it, on a cluster of its own: Ctrl-C ends it in order, and what is left of a killed one is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil

from fleet.app.plans import final_digest
from fleet.cluster.processes import calling
from fleet.protocol.records import Committed
from tests.fault.test_bad_luck import STEPS, fault_free
from tests.support.journals import NAME, records, wait_for_checkpoint
from tests.support.waiting import until

__all__ = ["fault_free"]

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
from tests.support.trains import plain

def train(run):
    plain(run)
"""


def fleet_run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(SCRIPT)
    common = ["--storage", str(folder / "runs"), "--json", str(folder / "report.json")]
    command = calling("fleet.cli.main", "main", "run", *arguments, *common)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def first_run(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    arguments = ("job.py", "--world", "2", "--nodes", "1", "--shards", "8", "--checkpoint", "1s")
    options = ("--set", f"steps={STEPS}", "--set", "pause_s=0.15", "--set", "norm=layer", "--set", f"flags={folder}")
    process, runs = fleet_run(folder, *arguments, *options), folder / "runs"
    until(lambda: any(runs.glob(f"*/{NAME}")), "there is a journal", 60)
    return process, next(runs.glob(f"*/{NAME}")).parent


def test_ctrl_c_stops_in_order_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process, folder = first_run(tmp_path)
    wait_for_checkpoint(folder)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopping in order" in said
    assert "watch it at http://127.0.0.1:" in said
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "stopped"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_killed_driver_leaves_nothing_behind_and_its_run_is_resumed(tmp_path: Path, fault_free: str) -> None:
    process, folder = first_run(tmp_path)
    wait_for_checkpoint(folder)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=10)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    before = max(record.state.step for record in records(folder) if isinstance(record, Committed))
    said, _ = (again := fleet_run(tmp_path, "--resume", folder.name)).communicate(timeout=120)
    assert again.returncode == 0, said
    assert before > 0
    assert final_digest(folder) == fault_free
    assert json.loads((tmp_path / "report.json").read_text())["closes"]
