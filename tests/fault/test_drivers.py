"""``fleet run`` as a user calls it, on a cluster of its own: Ctrl-C ends it in order, and what is left of a killed one is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from actors.control_store import LOST_S
from chaos.arrivals import save_trace
from fleet.app.plans import final_digest
from fleet.host.processes import calling
from fleet.protocol.exit_codes import Exit
from fleet.protocol.records import Committed, FaultRecord, ProcessLost, ProcessUp
from fleet.protocol.types import Fault
from tests.fault.test_bad_luck import STEPS, fault_free
from tests.support.journals import NAME, durable, records, wait_for_checkpoint
from tests.support.processes import begin
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
    command = calling("fleet.app.cli.main", "main", "run", *arguments, *common)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return begin(command, folder, environment)


def first_run(folder: Path, *words: str, pause_s: float = 0.15) -> tuple[subprocess.Popen[str], Path]:
    arguments = ("job.py", "--world", "2", "--nodes", "1", "--shards", "8", "--checkpoint", "1s")
    options = ("--set", f"steps={STEPS}", "--set", f"pause_s={pause_s}", "--set", "norm=layer", "--set", f"flags={folder}")
    process, runs = fleet_run(folder, *arguments, *options, *words), folder / "runs"
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
    kept = records(folder)
    assert durable(kept)[-1].state == [record for record in kept if isinstance(record, Committed)][-1].state
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_driver_that_stands_still_while_a_rank_is_killed_holds_nobody_up(tmp_path: Path, fault_free: str) -> None:
    process, folder = first_run(tmp_path, pause_s=0.8)
    wait_for_checkpoint(folder)
    driver = psutil.Process(process.pid)
    driver.suspend()
    try:
        up = next(record for record in records(folder) if isinstance(record, ProcessUp))
        os.kill(up.process.pid, signal.SIGKILL)
        before = committed(folder)
        threading.Event().wait(20.0)
        assert committed(folder) > before and any(isinstance(record, ProcessLost) for record in records(folder))
    finally:
        driver.resume()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert final_digest(folder) == fault_free
    assert json.loads((tmp_path / "report.json").read_text())["closes"]


@pytest.mark.timeout(300)
def test_a_run_whose_control_store_is_killed_ends_in_order_and_is_resumed(tmp_path: Path, fault_free: str) -> None:
    """Ranks need it for nothing, and Ray starts none again: a minute later it ends its cluster."""
    save_trace((Fault("f1", 1.0, "gcs", "kill_gcs"),), tmp_path / "trace.csv")
    process, folder = first_run(tmp_path, "--chaos", f"trace={tmp_path / 'trace.csv'}", pause_s=1.2)
    said, _ = process.communicate(timeout=150)
    assert process.returncode == Exit.STOPPED, said
    reported = " ".join(said.split())
    assert "Ray's control store (GCS) at" in reported and "has not answered for" in reported and "--resume" in reported, said
    kept = records(folder)
    [injected_s] = [record.at_s for record in kept if isinstance(record, FaultRecord) and record.phase == "executed"]
    last = [record for record in kept if isinstance(record, Committed)][-1]
    assert last.at_s > injected_s + LOST_S / 2, "ranks went on meanwhile"
    assert durable(kept)[-1].state == last.state
    assert json.loads((tmp_path / "report.json").read_text())["closes"]
    assert not [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)], "nothing of its cluster is left"
    said, _ = (again := fleet_run(tmp_path, "--resume", folder.name)).communicate(timeout=120)
    assert again.returncode == 0, said
    assert final_digest(folder) == fault_free


def committed(folder: Path) -> int:
    return max(record.state.step for record in records(folder) if isinstance(record, Committed))


def test_a_killed_driver_leaves_nothing_behind_and_its_run_is_resumed(tmp_path: Path, fault_free: str) -> None:
    process, folder = first_run(tmp_path, "--resume-or-start", "job")
    wait_for_checkpoint(folder)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=10)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    before = committed(folder)
    said, _ = (again := fleet_run(tmp_path, "--resume-or-start", "job")).communicate(timeout=120)
    assert again.returncode == 0, said
    assert before > 0 and folder.name == "job"
    assert final_digest(folder) == fault_free
    assert json.loads((tmp_path / "report.json").read_text())["closes"]
    said, _ = (once_more := fleet_run(tmp_path, "job.py", "--resume-or-start", "job")).communicate(timeout=60)
    assert once_more.returncode == 0 and "job is completed" in said
