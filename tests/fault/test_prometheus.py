"""Real Prometheus and a real run under chaos: every panel has data, alerts fire and clear; ``fleet up`` brings both up by itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import requests

from chaos.arrivals import save_trace
from chaos.settings import ChaosSettings
from dashboards.panels import panels
from dashboards.rules import rules
from fleet.config import CheckpointSettings, RunSettings
from fleet.launch.local import LocalCluster
from fleet.plans import RunPlan, RunResult
from fleet.recipes import LiveRun
from fleet.types import Fault
from tests.fault.test_bad_luck import FAST
from tests.golden.journals import one_loss
from tests.support import trains
from tests.support.prometheus import Server, scraping
from tests.support.waiting import until
from tests.support.watching import watched

ROOT = Path(__file__).resolve().parents[2]
SHORT = 0.03
"""Ten minutes of a rule are 18 s here."""
ALERT = "FleetCheckpointOverdue"


def plan(root: Path) -> RunPlan:
    """It goes on until it is stopped; two ranks are killed on the way."""
    save_trace([Fault(f"kill-{slot}", 3.0 * slot, "gpu", "kill_rank", slot=slot) for slot in (1, 2)], root / "trace.csv")
    settings = RunSettings(
        world=3, spares=1, nodes=3, shards=8, timeouts=dataclasses.replace(FAST, checkpoint_s=5.0),
        checkpoint=CheckpointSettings(policy="fixed", interval_s=1.0),
        options={"steps": "100000", "pause_s": "0.1", "flags": str(root)},
    )  # fmt: skip
    chaos = ChaosSettings(trace=str(root / "trace.csv"))
    return RunPlan(name="chaotic", folder=root / "chaotic", settings=settings, train=trains.plain, chaos=chaos)


@contextmanager
def broken_store(folder: Path) -> Iterator[None]:
    """Where checkpoints go there is a file, and no folder."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("no folder")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


def answers(prometheus: Server, expr: str) -> bool:
    asked = expr.replace("$run", "chaotic").replace("$__rate_interval", "5s")
    return bool(prometheus.query(asked))


def unanswered(prometheus: Server) -> set[str]:
    """Queries of panels that have had no data yet, when all that could come has come."""
    ahead = {expr for _, panel in panels() for expr, _ in panel.queries}

    def all_answered() -> bool:
        ahead.difference_update([expr for expr in ahead if answers(prometheus, expr)])
        return not ahead

    with suppress(TimeoutError):
        until(all_answered, "every panel has data", 45.0)
    return ahead


def test_every_panel_has_data_and_an_alert_fires_and_clears(cluster: LocalCluster, tmp_path: Path) -> None:
    results: list[RunResult] = []
    live = LiveRun(plan(tmp_path), cluster)
    thread = threading.Thread(target=lambda: results.append(live.execute()))
    firing = f'ALERTS{{alertname="{ALERT}",alertstate="firing",run="chaotic"}}'
    with watched(tmp_path) as served, scraping(tmp_path / "prometheus", [served.url.removeprefix("http://")], rules(SHORT)) as prometheus:
        thread.start()
        try:
            prometheus.until('fleet_checkpoints_total{run="chaotic",phase="durable"} > 1')
            assert not unanswered(prometheus)
            prometheus.until(f"absent({firing})")
            with broken_store(tmp_path / "chaotic" / "checkpoints"):
                prometheus.until(firing)
                prometheus.until('fleet_checkpoints_total{run="chaotic",phase="failed"} > 0')
            prometheus.until(f"absent({firing})")
            live.stop("seen enough")
        finally:
            live.stop("the test is over")
            thread.join(120)
        assert results[0].status == "stopped"
        prometheus.until('fleet_run_info{run="chaotic",status="stopped"}')


def fleet(*arguments: str) -> str:
    code = "import sys; from fleet.cli import main; sys.argv[0] = 'fleet'; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def test_fleet_up_serves_all_runs_with_a_prometheus_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with watched(root) as served:
        served.write("done", list(one_loss().records))
    said = fleet("up", "--storage", str(root), "--port", "0", "--with-prometheus", "--prometheus-port", "0")
    try:
        assert fleet("status", "--storage", str(root)) == said
        url = next(word for line in said.splitlines() if line.startswith("Prometheus") for word in line.split() if word.startswith("http"))
        [info] = Server(url).until("fleet_run_info")
        assert (info["metric"]["run"], info["metric"]["job"]) == ("story", "fleet")
    finally:
        down = fleet("down", "--storage", str(root))
    assert "down" in down
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=10)
    assert not (root / ".fleet" / "up.json").exists()
