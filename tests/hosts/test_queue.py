"""The queue of a cluster of several hosts: a run gives way to an urgent one, goes on, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import Committed, Resumed
from tests.support.host_runs import SHARDS, Shell, wait_until_clean
from tests.support.host_store import HostStore
from tests.support.ray_hosts import RayHosts
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(1200)

ROOT = "/srv/queue"
"""Where the service keeps its own files, and copies of what runs write."""


@pytest.fixture
def shell(ray_hosts: RayHosts, store: HostStore, tmp_path: Path) -> Iterator[Shell]:
    """Nothing of a test's runs is left on any host when it ends, but for what the head keeps of them."""
    yield Shell(ray_hosts, store, tmp_path)
    wait_until_clean(list(ray_hosts.hosts))


def reported(shell: Shell, *arguments: str) -> str:
    done = shell.fleet(*arguments, "--storage", ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(shell: Shell, name: str, world: int, *options: str, priority: int = 0) -> None:
    shape = ["--world", str(world), "--shards", str(SHARDS), "--name", name]
    words = [
        "cluster",
        "submit",
        "train.py",
        "--priority",
        str(priority),
        "--storage",
        ROOT,
        "--",
        *shape,
        "--storage",
        shell.store.url("runs"),
    ]
    done = shell.fleet(*words, *options)
    assert done.returncode == 0, done.stdout + done.stderr


def job(shell: Shell, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shell.head.run(["cat", f"{ROOT}/.fleet/queue/{name}.json"]).stdout)
    return found


def test_a_run_gives_way_and_ends_with_the_same_bits(shell: Shell) -> None:
    """Six ranks have room. One run of five has it, an urgent one of three comes, and one of another size says what the bits are."""
    undisturbed = shell.run("undisturbed-queue", world=2, spares=0)
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    reported(shell, "cluster", "up", "--address", shell.cluster.head.address, "--port", "0", "--quota", "*=6")
    try:
        submit(shell, "low", 5, "--set", "pause_s=0.2")
        until(lambda: any(isinstance(each, Committed) for each in shell.records(f"{ROOT}/low")), "it trains", 180.0, tick_s=1.0)
        assert "low" in reported(shell, "cluster", "queue") and sum(job(shell, "low")["placed"].values()) == 5
        submit(shell, "high", 3, "--set", "steps=4", priority=5)
        until(lambda: job(shell, "high")["phase"] != "waiting", "low has given way", 180.0, tick_s=1.0)
        until(lambda: job(shell, "high")["phase"] == "ended" and job(shell, "low")["starts"] == 2, "low goes on", 240.0, tick_s=1.0)
        shell.go_fast()
        until(lambda: job(shell, "low")["phase"] == "ended", "both have ended", 300.0, tick_s=1.0)
        said = shell.head.run(["cat", f"{ROOT}/.fleet/queue/low.log"]).stdout
        assert (job(shell, "low")["exit_code"], job(shell, "high")["exit_code"]) == (0, 0), said
        low, truth = shell.seen(f"{ROOT}/low"), shell.seen("/srv/job/runs/undisturbed-queue")
        assert low.digest == truth.digest and low.report["closes"]
        assert any(isinstance(each, Resumed) for each in low.records)
        assert "high has priority 5, and this one 0" in shell.head.run(["cat", f"{ROOT}/.fleet/audit.jsonl"]).stdout
    finally:
        shell.go_slowly()
        reported(shell, "cluster", "down")


def test_what_a_cluster_can_never_have_is_refused_by_name(shell: Shell) -> None:
    refused = shell.fleet("cluster", "up", "--address", shell.cluster.head.address, "--port", "0", "--quota", "vision=7", "--storage", ROOT)
    assert refused.returncode == 2 and "there are 6 slots in all, so that this can never be met" in refused.stdout + refused.stderr
    reported(shell, "cluster", "up", "--address", shell.cluster.head.address, "--port", "0", "--quota", "vision=2")
    try:
        words = [
            "cluster",
            "submit",
            "train.py",
            "--storage",
            ROOT,
            "--team",
            "vision",
            "--",
            "--world",
            "3",
            "--storage",
            shell.store.url("runs"),
        ]
        refused = shell.fleet(*words)
        assert refused.returncode == 2 and "team vision may have 2 slots at once, and this run needs 3" in refused.stdout + refused.stderr
        assert "6 of 6 slots are free" in reported(shell, "cluster", "queue")
    finally:
        reported(shell, "cluster", "down")
