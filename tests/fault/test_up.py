"""``fleet up`` brings the page and a real Prometheus up, and ``fleet down`` leaves nothing of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from tests.golden.journals import one_loss
from tests.support.prometheus import Server
from tests.support.watching import watched

ROOT = Path(__file__).resolve().parents[2]


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
