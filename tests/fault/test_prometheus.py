"""Real Prometheus and a real run under chaos: every panel has data, alerts fire and clear; ``fleet up`` brings both up by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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
KILLS_S = (1.0, 4.0, 7.0, 10.0, 13.0)


def plan(root: Path) -> RunPlan:
    save_trace([Fault(f"kill-{number}", at_s, "gpu", "kill_rank", slot=1) for number, at_s in enumerate(KILLS_S)], root / "trace.csv")
    settings = RunSettings(
        world=3, spares=1, nodes=3, shards=8, timeouts=FAST, checkpoint=CheckpointSettings(policy="fixed", interval_s=1.0),
        options={"steps": "180", "pause_s": "0.1", "flags": str(root)},
    )  # fmt: skip
    chaos = ChaosSettings(trace=str(root / "trace.csv"))
    return RunPlan(name="chaotic", folder=root / "chaotic", settings=settings, train=trains.plain, chaos=chaos)


def answers(prometheus: Server, expr: str) -> bool:
    asked = expr.replace("$run", "chaotic").replace("$__rate_interval", "5s")
    return bool(prometheus.query(asked))


def test_every_panel_has_data_and_an_alert_fires_and_clears(cluster: LocalCluster, tmp_path: Path) -> None:
    results: list[RunResult] = []
    live = LiveRun(plan(tmp_path), cluster)
    thread = threading.Thread(target=lambda: results.append(live.execute()))
    with watched(tmp_path) as served, scraping(tmp_path / "prometheus", [served.url.removeprefix("http://")], rules(SHORT)) as prometheus:
        thread.start()
        try:
            prometheus.until('fleet_run_info{run="chaotic",status="running"}')
            prometheus.until('ALERTS{alertname="FleetCrashLoop",alertstate="firing",run="chaotic"}')
            ahead = {expr for _, panel in panels() for expr, _ in panel.queries}

            def all_answered() -> bool:
                ahead.difference_update([expr for expr in ahead if answers(prometheus, expr)])
                return not ahead

            try:
                until(all_answered, "every panel has data", 30.0)
            except TimeoutError:
                raise AssertionError(f"no data for {sorted(ahead)}") from None
        finally:
            thread.join(120)
        assert results[0].status == "completed"
        prometheus.until('fleet_run_info{run="chaotic",status="completed"}')
        until(lambda: "FleetCrashLoop" not in prometheus.firing(), "the alert is back to normal", 60.0)
        [steps] = prometheus.query('fleet_steps_committed_total{run="chaotic"}')
        assert float(steps["value"][1]) >= 180


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
