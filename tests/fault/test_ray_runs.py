"""Whole runs on a real Ray cluster: through kills, a lost node, a bug, Ctrl-C, and the death of Ray Train's controller and of the driver.

What completes, completes with the bits of a run that nothing happened to."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray

from chaos.arrivals import save_trace
from chaos.settings import ChaosSettings
from dashboards.panels import panels
from dashboards.rules import rules
from fleet.clock import unix_time_s
from fleet.config import CheckpointSettings, RunSettings
from fleet.journal import read_journal
from fleet.launch.local import LocalCluster
from fleet.launch.processes import calling
from fleet.plans import RunPlan, RunResult, final_digest
from fleet.recipes import LiveRun
from fleet.records import Committed, FaultRecord, LineageBegun, ProcessLost, Record, ViewPublished
from fleet.report import build_report, render_table
from fleet.types import Fault
from storage import nodes
from tests.fault.test_bad_luck import FAST, settings, train_through
from tests.support import trains
from tests.support.prometheus import filled, scraping
from tests.support.waiting import until
from tests.support.watching import watched

STEPS = "60"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an undisturbed run without Ray, at another world size."""
    folder = tmp_path_factory.mktemp("truth")
    return train_through(trains.plain, settings(folder, world=1, options={"steps": STEPS}), folder)[2]


def plan(folder: Path, name: str = "run", **changes: object) -> RunPlan:
    chosen = RunSettings(
        world=3, spares=1, nodes=3, shards=8, timeouts=FAST, checkpoint=CheckpointSettings(policy="fixed", interval_s=1.0),
        options={"flags": str(folder), "steps": STEPS, "pause_s": "0.1", "norm": "layer"},
    )  # fmt: skip
    return RunPlan(name=name, folder=folder / name, settings=chosen, train=trains.plain, **changes)  # type: ignore[arg-type]


def records(folder: Path) -> list[Record]:
    return list(read_journal(folder / "journal.jsonl"))


@dataclass(frozen=True)
class Watched:
    """A run under chaos, which a real Prometheus scraped; ``unanswered`` are the queries of dashboards that never had an answer."""

    folder: Path
    result: RunResult
    unanswered: list[str]


@pytest.fixture(scope="module")
def under_chaos(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("chaos")
    node = next(iter(cluster.alive()))
    faults = (
        Fault("f1", 1.0, "gpu", "kill_rank", slot=1),
        Fault("f2", 3.0, "host_parts", "lose_node", node=node),
        Fault("f3", 5.0, "gpu", "kill_rank", slot=0),
    )
    save_trace(faults, folder / "trace.csv")
    chosen = plan(folder, chaos=ChaosSettings(trace=str(folder / "trace.csv"), repair_s=2.0))
    begun_s = unix_time_s()
    with watched(folder) as served, scraping(folder / "prometheus", [served.url.removeprefix("http://")], rules(0.01)) as prometheus:
        result = LiveRun(chosen, cluster).execute()
        asked = [
            (f"{board.title}, {panel.title}: {expr}", filled(expr, chosen.name)) for board, panel in panels() for expr, _ in panel.queries
        ]
        unanswered = [name for name, expr in asked if not prometheus.history(expr, begun_s, unix_time_s())]
    return Watched(chosen.folder, result, unanswered)


def test_a_run_through_kills_and_a_lost_node_is_bit_identical(under_chaos: Watched, truth: str) -> None:
    assert under_chaos.result.status == "completed", under_chaos.result
    assert final_digest(under_chaos.folder) == truth
    report = build_report(records(under_chaos.folder)).to_dict()
    assert report["closes"]
    executed = {r.fault.kind for r in records(under_chaos.folder) if isinstance(r, FaultRecord) and r.phase == "executed"}
    assert executed == {"kill_rank", "lose_node"}


def test_every_panel_of_every_dashboard_has_an_answer_while_chaos_strikes(under_chaos: Watched) -> None:
    assert not under_chaos.unanswered


def test_a_flipped_bit_in_one_ranks_weights_is_outvoted_and_changes_no_bit_of_the_result(
    cluster: LocalCluster, tmp_path: Path, truth: str
) -> None:
    save_trace((Fault("f1", 5.0, "silent_corruption", "flip_weight", slot=1),), tmp_path / "trace.csv")
    slow = plan(tmp_path).settings  # long enough for all ranks to be there when it strikes
    slow = dataclasses.replace(slow, spares=0, options={**slow.options, "pause_s": "0.25"})  # slot 1 is in the view, whoever comes first
    chosen = dataclasses.replace(plan(tmp_path, chaos=ChaosSettings(trace=str(tmp_path / "trace.csv"))), settings=slow)
    result = LiveRun(chosen, cluster).execute()
    assert result.status == "completed", result
    assert final_digest(chosen.folder) == truth
    kept = records(chosen.folder)
    [lost] = [record for record in kept if isinstance(record, ProcessLost) and record.fault == "f1"]
    assert "silent corruption: weights" in lost.cause
    phases = [record.phase for record in kept if isinstance(record, FaultRecord)]
    assert phases == ["planned", "executed", "healed"]
    report = build_report(kept)
    assert report.to_dict()["closes"]
    assert "differ from the majority" in render_table(report)
    known = nodes.load(tmp_path / nodes.NAME)
    assert known
    assert not any(one.incidents for one in known), "chaos did it, not the node"


def test_a_users_bug_ends_the_run_with_the_users_traceback(cluster: LocalCluster, tmp_path: Path) -> None:
    chosen = RunPlan(name="bug", folder=tmp_path / "bug", settings=plan(tmp_path).settings, train=trains.raises)
    result = LiveRun(chosen, cluster).execute()
    assert result.status == "failed"
    assert "a bug of the user's, at step 10" in result.reason
    assert "actors" not in result.detail


def test_ray_trains_controller_is_killed_and_the_run_goes_on_from_memory(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    """All ranks die with the controller. The agents keep copies of the state in their memory; nothing was ever written to the store."""
    copies = CheckpointSettings(policy="fixed", interval_s=3600.0, peer_interval_s=0.5)
    chosen, results, before = plan(tmp_path), list[RunResult](), controllers(cluster)
    chosen = dataclasses.replace(chosen, settings=dataclasses.replace(chosen.settings, checkpoint=copies))
    live = LiveRun(chosen, cluster)
    thread = threading.Thread(target=lambda: results.append(live.execute()))
    thread.start()
    wait_for_checkpoint(chosen.folder)
    [controller] = controllers(cluster) - before
    os.kill(controller, signal.SIGKILL)
    thread.join(90)
    assert not thread.is_alive(), "fit() did not return"
    assert results[0].status == "completed", results
    assert final_digest(chosen.folder) == truth
    [rollback] = [record for record in records(chosen.folder) if isinstance(record, LineageBegun)]
    assert rollback.from_state.step > 0
    from_memory = [r for r in records(chosen.folder) if isinstance(r, ViewPublished) and (r.view.checkpoint or "").startswith("peers://")]
    assert len(from_memory) == 1


def controllers(cluster: LocalCluster) -> set[int]:
    """Processes of this cluster that run Ray Train's controller."""
    return {pid for pid in cluster.pids() if b"ShieldedController" in command_of(pid)}


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:  # it has just ended
        return b""


def wait_for_checkpoint(folder: Path, limit_s: float = 60.0) -> None:
    """Until a durable checkpoint is in the journal, and a commit: the first checkpoint may come before the first commit is noted."""
    journal = folder / "journal.jsonl"

    def there() -> bool:
        return journal.exists() and b'"durable"' in journal.read_bytes() and any(isinstance(r, Committed) for r in records(folder))

    until(there, "a durable checkpoint and a commit are in the journal", limit_s)


SCRIPT = """
from tests.support.trains import plain

def train(run):
    plain(run)
"""


def fleet_run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(SCRIPT)
    common = ["--storage", str(folder / "runs"), "--json", str(folder / "report.json")]
    command = calling("fleet.cli", "main", "run", *arguments, *common)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def first_run(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    arguments = ("job.py", "--world", "2", "--nodes", "1", "--shards", "8", "--checkpoint", "1s")
    options = ("--set", f"steps={STEPS}", "--set", "pause_s=0.1", "--set", "norm=layer", "--set", f"flags={folder}")
    process = fleet_run(folder, *arguments, *options)
    deadline_s = time.monotonic() + 60
    while not list((folder / "runs").glob("*/journal.jsonl")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return process, next((folder / "runs").glob("*/journal.jsonl")).parent


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


def test_a_killed_driver_leaves_nothing_behind_and_its_run_is_resumed(tmp_path: Path, truth: str) -> None:
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
    assert final_digest(folder) == truth
    assert json.loads((tmp_path / "report.json").read_text())["closes"]


def test_nothing_of_these_runs_is_left_in_the_cluster(cluster: LocalCluster) -> None:
    """Actors of ended runs are gone; the next run finds the cluster as new."""
    assert ray.is_initialized()
    assert cluster.alive()
    assert not [name for name in ray.util.list_named_actors() if name.startswith("fleet-")]
