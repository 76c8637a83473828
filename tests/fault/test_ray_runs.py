"""Whole runs on a real Ray cluster: through kills, a lost node, a bug, and the death of Ray Train's controller.

What completes, completes with the bits of a run that nothing happened to."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest
import ray

from chaos.arrivals import save_trace
from chaos.daemons import MAY_FILL
from chaos.settings import ChaosSettings
from dashboards.grafana.panels import panels
from dashboards.metrics.rules import rules
from fleet.app.cluster.local import LocalCluster
from fleet.app.plans import RunPlan, RunResult, final_digest
from fleet.app.recipes import LiveRun
from fleet.app.report import build_report, render_table
from fleet.host.clock import unix_time_s
from fleet.protocol.records import CheckpointRecord, FaultRecord, HistoryBegun, ProcessLost, ProcessUp, Record, ViewPublished
from fleet.protocol.types import Fault
from fleet.settings.cost import CostSettings
from fleet.settings.run import CheckpointSettings, RunSettings
from storage import nodes
from tests.fault.test_bad_luck import FAST, settings
from tests.support import trains
from tests.support.disks import block_disk, small_disk
from tests.support.journals import durable, records, wait_for_checkpoint
from tests.support.processes import command_of
from tests.support.programs import program
from tests.support.prometheus import filled, quick, scraping
from tests.support.undisturbed import Undisturbed
from tests.support.waiting import until
from tests.support.watching import watched

OPTIONS = {"steps": "60", "norm": "layer", "width": "1024"}
"""A model of thirteen blocks, so that every rank has some of the optimizer's state where that is sharded."""


@pytest.fixture(scope="module")
def truth(undisturbed: Undisturbed) -> str:
    """The digest of an undisturbed run without Ray, at another world size."""
    return undisturbed(lambda folder: settings(folder, world=1, options=OPTIONS))


def plan(folder: Path, name: str = "run", **changes: object) -> RunPlan:
    chosen = RunSettings(
        world=3, spares=1, nodes=3, shards=8, timeouts=FAST, checkpoint=CheckpointSettings(policy="fixed", interval_s=1.0),
        options=OPTIONS | {"flags": str(folder), "pause_s": "0.1"},
    )  # fmt: skip
    return RunPlan(name=name, folder=folder / name, settings=chosen, train=trains.plain, **changes)  # type: ignore[arg-type]


def under_chaos(cluster: LocalCluster, folder: Path, **options: str) -> RunPlan:
    """A rank is killed, then a node is lost, then another rank."""
    node = next(iter(cluster.alive()))
    faults = (
        Fault("f1", 1.0, "gpu", "kill_rank", slot=1),
        Fault("f2", 8.0, "host_parts", "lose_node", node=node),
        Fault("f3", 16.0, "gpu", "kill_rank", slot=0),
    )
    save_trace(faults, folder / "trace.csv")
    chosen = plan(folder, chaos=ChaosSettings(trace=str(folder / "trace.csv"), repair_s=2.0, lose_all=True))
    return dataclasses.replace(chosen, settings=dataclasses.replace(chosen.settings, options={**chosen.settings.options, **options}))


def test_a_barrier_of_ray_train_is_refused_at_its_line(cluster: LocalCluster, tmp_path: Path) -> None:
    result = LiveRun(dataclasses.replace(plan(tmp_path), train=trains.reports_to_ray), cluster).execute()
    assert result.status == "failed"
    assert "ray.train.report() was called at trains.py:" in result.reason
    assert "run.evaluate" in result.reason


def test_a_run_through_kills_and_a_lost_node_is_bit_identical(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    chosen = under_chaos(cluster, tmp_path, pause_s="0.4")
    assert LiveRun(chosen, cluster).execute().status == "completed"
    assert final_digest(chosen.folder) == truth
    report = build_report(records(chosen.folder)).to_dict()
    assert report["closes"]
    executed = {r.fault.kind for r in records(chosen.folder) if isinstance(r, FaultRecord) and r.phase == "executed"}
    assert executed == {"kill_rank", "lose_node"}


def test_every_panel_of_every_dashboard_has_an_answer_while_chaos_strikes(cluster: LocalCluster, tmp_path: Path) -> None:
    program("prometheus")
    priced = CostSettings(usd_per_rank_hour=2.0, usd_per_gb_month=0.02, watts_per_rank=700.0, g_co2_per_kwh=300.0, budget_usd=500.0)
    chosen = under_chaos(cluster, tmp_path, pause_s="0.7", tokens="8")  # drift is known after half a minute
    chosen, begun_s = dataclasses.replace(chosen, settings=dataclasses.replace(chosen.settings, cost=priced)), unix_time_s()
    with (
        watched(tmp_path) as served,
        scraping(tmp_path / "prometheus", [served.url.removeprefix("http://")], quick(rules(), 0.01)) as prometheus,
    ):
        assert LiveRun(chosen, cluster).execute().status == "completed"
        asked = [(board.title, panel.title, expr) for board, panel in panels() for expr, _ in panel.queries]
        ends_s = unix_time_s()
        assert not [each for each in asked if not prometheus.history(filled(each[2], chosen.name), begun_s, ends_s)]


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
    assert "silent corruption: weights" in str(lost.cause)
    phases = [record.phase for record in kept if isinstance(record, FaultRecord)]
    assert phases == ["planned", "executed", "healed"]
    report = build_report(kept)
    assert report.to_dict()["closes"]
    assert "differ from the majority" in render_table(report)
    known = nodes.load(tmp_path / nodes.NAME)
    assert known
    assert not any(one.incidents for one in known), "chaos did it, not the node"


def on_a_disk(cluster: LocalCluster, disk: Path, fault: Fault) -> tuple[RunPlan, list[Record]]:
    """A run whose folder is on ``disk``, which a fault strikes; it is completed, and nobody is lost."""
    (disk / MAY_FILL).touch()
    trace = disk.with_suffix(".csv")
    save_trace((fault,), trace)
    chosen = plan(disk, chaos=ChaosSettings(trace=str(trace)))
    lasts = {**chosen.settings.options, "pause_s": "0.4"}
    result = LiveRun(dataclasses.replace(chosen, settings=dataclasses.replace(chosen.settings, options=lasts)), cluster).execute()
    assert result.status == "completed", result
    kept = records(chosen.folder)
    assert [record.phase for record in kept if isinstance(record, FaultRecord)] == ["planned", "executed", "healed"]
    assert not any(isinstance(record, ProcessLost) for record in kept)
    assert durable(kept) and build_report(kept).to_dict()["closes"]
    return chosen, kept


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_no_rank(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    """The journal is on it, too: the coordinator ends, Ray starts it again, and it goes on once there is room."""
    with small_disk(tmp_path / "disk", 64) as disk:
        chosen, kept = on_a_disk(cluster, disk, Fault("f1", 2.0, "disk", "store_full", duration_s=5.0))
        assert final_digest(chosen.folder) == truth
    assert any("No space left" in record.detail for record in kept if isinstance(record, CheckpointRecord) and record.phase == "failed")


def test_a_slow_disk_costs_time_to_save_and_no_rank(cluster: LocalCluster, tmp_path: Path, truth: str) -> None:
    """The journal is on it, too."""
    with block_disk(tmp_path / "disk", 256) as disk:
        chosen, kept = on_a_disk(cluster, disk, Fault("f1", 2.0, "disk", "disk_slow", duration_s=6.0, bytes_per_s=5e4))
        assert final_digest(chosen.folder) == truth
    latencies_s = sorted(record.latency_s for record in durable(kept))
    assert latencies_s[-1] > latencies_s[0] + 1.0, latencies_s


def test_a_users_bug_ends_the_run_with_the_users_traceback(cluster: LocalCluster, tmp_path: Path) -> None:
    chosen = RunPlan(name="bug", folder=tmp_path / "bug", settings=plan(tmp_path).settings, train=trains.raises)
    result = LiveRun(chosen, cluster).execute()
    assert result.status == "failed"
    assert "a bug of the user's, at step 10" in result.reason
    assert "actors" not in result.detail


@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_with_sharded_state_a_rank_is_lost_and_then_ray_trains_controller(
    sharding: str, cluster: LocalCluster, tmp_path: Path, truth: str
) -> None:
    """A guard has the rank's part. With the controller all ranks die: the agents have copies in their memory, the store has none."""
    chosen, results, before = plan(tmp_path), list[RunResult](), controllers(cluster)
    copies = CheckpointSettings(policy="fixed", interval_s=3600.0, peer_interval_s=0.5)
    slow = chosen.settings.options | {"pause_s": "0.3"}  # it has to train longer than Ray needs to end ranks whose controller is gone
    changed = dataclasses.replace(chosen.settings, checkpoint=copies, optimizer_sharding=sharding, options=slow)
    chosen = dataclasses.replace(chosen, settings=changed)
    live = LiveRun(chosen, cluster)
    thread = threading.Thread(target=lambda: results.append(live.execute()))
    thread.start()
    wait_for_checkpoint(chosen.folder)
    os.kill(rank_in_view(records(chosen.folder)), signal.SIGKILL)
    until(lambda: went_on(chosen.folder), "the ranks that are left have committed, and a copy of that is kept", 30)
    [controller] = controllers(cluster) - before
    os.kill(controller, signal.SIGKILL)
    thread.join(150)
    assert not thread.is_alive(), "fit() did not return"
    assert results[0].status == "completed", results
    assert final_digest(chosen.folder) == truth
    kept = records(chosen.folder)
    [rollback] = [record for record in kept if isinstance(record, HistoryBegun)]
    assert rollback.from_state.step > 0
    from_memory = [r for r in kept if isinstance(r, ViewPublished) and (r.view.checkpoint or "").startswith("peers://")]
    assert len(from_memory) == 1


def rank_in_view(kept: list[Record]) -> int:
    """The process of the newest view's last rank."""
    last = [record.view for record in kept if isinstance(record, ViewPublished)][-1].members[-1]
    return next(record.process.pid for record in kept if isinstance(record, ProcessUp) and record.member == last)


def went_on(folder: Path) -> bool:
    """Whether a copy of a state is kept that was committed after a loss."""
    kept = records(folder)
    lost = next((number for number, record in enumerate(kept) if isinstance(record, ProcessLost)), len(kept))
    return any(isinstance(one, CheckpointRecord) and one.phase == "durable" for one in kept[lost + 1 :])


def controllers(cluster: LocalCluster) -> set[int]:
    """Processes of this cluster that run Ray Train's controller."""
    return {pid for pid in cluster.pids() if b"ShieldedController" in command_of(pid)}


def test_nothing_of_these_runs_is_left_in_the_cluster(cluster: LocalCluster) -> None:
    """Actors of ended runs are gone; the next run finds the cluster as new."""
    assert ray.is_initialized()
    assert cluster.alive()
    assert not [name for name in ray.util.list_named_actors() if name.startswith("fleet-")]
