"""``fleet cluster up`` brings the page, a queue and a real Prometheus up, and ``fleet cluster down`` leaves nothing of them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
import requests

from fleet.app.plans import final_digest
from fleet.app.report import build_report
from fleet.host.journal import read_journal
from fleet.host.processes import calling
from fleet.protocol.records import Committed, FaultRecord, ProcessLost, Record, Resumed, RunEnded
from tests.fault.test_bad_luck import STEPS, fault_free
from tests.golden.journals import one_loss
from tests.support.programs import program
from tests.support.prometheus import Server
from tests.support.waiting import until
from tests.support.watching import watched

__all__ = ["fault_free"]

ROOT = Path(__file__).resolve().parents[2]


def fleet(*arguments: str) -> str:
    return run(*arguments).stderr


def fleet_out(*arguments: str) -> str:
    return run(*arguments).stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "1000"}
    command = calling("fleet.app.cli.main", "main", *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def kinds(folder: Path) -> set[type[Record]]:
    journal = folder / "journal.jsonl"
    return {type(record) for record in read_journal(journal)} if journal.exists() else set()


def injected(folder: Path) -> set[str]:
    """How far the killing of a rank has come: planned, executed ..."""
    faults = (record for record in read_journal(folder / "journal.jsonl") if isinstance(record, FaultRecord))
    return {record.phase for record in faults if record.fault.kind == "kill_rank"}


def inject(root: Path, name: str) -> None:
    """Kill rank 1 of a run through the service of its folder."""
    url, token = json.loads((root / ".fleet" / "up.json").read_text())["url"], (root / ".fleet" / "token").read_text().strip()
    order = {"action": "inject", "kind": "kill_rank", "slot": 1}
    answer = requests.post(f"{url}/api/runs/{name}/chaos", json=order, headers={"Authorization": f"Bearer {token}"}, timeout=20)
    assert answer.status_code == 202, answer.text


def test_runs_that_are_handed_in_have_their_turn_and_all_their_ranks(tmp_path: Path) -> None:
    """Two runs of two ranks and a service with room for three: the second waits for the first, and its journal says how long. The service
    passes an order to the first on to it: a rank is killed, and the run goes on."""
    root, script = tmp_path / "runs", tmp_path / "script.py"
    script.write_text("from tests.support.trains import with_a_last_step_that_waits as train\n")
    fleet("cluster", "up", "--storage", str(root), "--port", "0", "--slots", "3")
    (tmp_path / "almost").touch()
    options = ["--world", "2", "--nodes", "1", "--shards", "4", "--set", "steps=5", "--set", f"flags={tmp_path}", "--storage", str(root)]
    try:
        names = [fleet("cluster", "submit", str(script), *options).split()[0] for _ in range(2)]
        folder = root / ".fleet" / "queue"

        def phases() -> list[str]:
            return [json.loads((folder / f"{name}.json").read_text())["phase"] for name in names]

        until(lambda: phases() == ["running", "waiting"], "the first one runs")
        assert "waiting" in fleet_out("cluster", "queue", "--storage", str(root))
        until(lambda: Committed in kinds(root / names[0]), "it trains")
        inject(root, names[0])
        until(
            lambda: ProcessLost in kinds(root / names[0]) and "executed" in injected(root / names[0]), "its rank is killed, and it is told"
        )
        service = psutil.Process(json.loads((root / ".fleet" / "up.json").read_text())["pid"])
        service.suspend()  # runs need it to begin, and for nothing else
        (tmp_path / "end").touch()
        until(lambda: RunEnded in kinds(root / names[0]), "the first ends beside a service that stands still")
        threading.Event().wait(20.0)
        assert phases() == ["running", "waiting"]
        service.resume()
        until(lambda: phases() == ["ended", "ended"], "both have ended")
    finally:
        fleet("cluster", "down", "--storage", str(root))
    first, second = (build_report(read_journal(root / name / "journal.jsonl")) for name in names)
    assert [one.summary.status for one in (first, second)] == ["completed", "completed"], (folder / f"{names[1]}.log").read_text()
    assert second.summary.started_unix_s >= first.summary.unix_s(first.summary.now_s)
    assert second.summary.queued_s > first.summary.queued_s > 0


def actions(root: Path) -> list[tuple[str, str]]:
    """(action, run) of each line of the audit log."""
    lines = (json.loads(line) for line in (root / ".fleet" / "audit.jsonl").read_text().splitlines())
    return [(line["action"], line["run"]) for line in lines]


@pytest.mark.timeout(600)
def test_a_run_gives_way_to_an_urgent_one_and_ends_with_the_same_bits(tmp_path: Path, fault_free: str) -> None:
    root, script = tmp_path / "runs", tmp_path / "script.py"
    script.write_text("from tests.support.trains import plain as train\n")
    fleet("cluster", "up", "--storage", str(root), "--port", "0", "--slots", "2", "--preempt")
    common = ["--world", "2", "--nodes", "1", "--shards", "8", "--set", "norm=layer", "--set", f"flags={tmp_path}", "--storage", str(root)]
    folder = root / ".fleet" / "queue"

    def phases() -> list[str]:
        return [json.loads((folder / f"{name}.json").read_text())["phase"] for name in ("low", "high")]

    def submit(name: str, *words: str) -> None:
        fleet("cluster", "submit", str(script), "--name", name, *common, *words)

    try:
        submit("low", "--set", f"steps={STEPS}", "--set", "pause_s=0.5")
        until(lambda: Committed in kinds(root / "low"), "it trains", 120.0)
        submit("high", "--priority", "5", "--set", "steps=4")
        until(lambda: phases() == ["waiting", "running"], "it has given way", 120.0)
        assert RunEnded in kinds(root / "low"), "it has ended in order"
        until(lambda: phases() == ["ended", "ended"], "both have ended", 300.0)
    finally:
        fleet("cluster", "down", "--storage", str(root))
    low, high = (build_report(read_journal(root / name / "journal.jsonl")) for name in ("low", "high"))
    assert [one.summary.status for one in (low, high)] == ["completed", "completed"], (folder / "low.log").read_text()
    assert final_digest(root / "low") == fault_free
    begun = [record for record in read_journal(root / "low" / "journal.jsonl") if isinstance(record, Resumed)]
    assert len(begun) == 1
    assert actions(root) == [
        ("submit", "low"), ("start", "low"), ("submit", "high"), ("preempt", "low"), ("released", "low"), ("start", "high"),
        ("end", "high"), ("resume", "low"), ("end", "low"),
    ]  # fmt: skip
    assert "high has priority 5, and this one 0" in (root / ".fleet/audit.jsonl").read_text()


def test_fleet_up_serves_all_runs_with_a_prometheus_and_leaves_nothing(tmp_path: Path) -> None:
    program("prometheus")
    root = tmp_path / "runs"
    with watched(root) as served:
        served.write("done", list(one_loss().records))
    said = fleet("cluster", "up", "--storage", str(root), "--port", "0", "--with-prometheus", "--prometheus-port", "0")
    try:
        assert fleet("status", "--storage", str(root)) == said
        url = next(word for line in said.splitlines() if line.startswith("Prometheus") for word in line.split() if word.startswith("http"))
        [info] = Server(url).until("fleet_run_info")
        assert (info["metric"]["run"], info["metric"]["job"]) == ("story", "fleet")
    finally:
        down = fleet("cluster", "down", "--storage", str(root))
    assert "down" in down
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=10)
    assert not (root / ".fleet" / "up.json").exists()
