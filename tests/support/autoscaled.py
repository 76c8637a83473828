"""A Ray cluster that grows and shrinks by itself: autoscaler v2, with Ray's provider of nodes that are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fleet.host.ports import free_port
from tests.support.waiting import until

KIND, IDLE_S = "rank", 3.0
OBJECT_STORE_BYTES = 80_000_000
HOST = "127.0.0.1"
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@dataclass(frozen=True)
class Autoscaled:
    """A running cluster: its head takes no ranks, its other nodes come when they are asked for."""

    address: str
    head: subprocess.Popen[bytes]
    env: Mapping[str, str]

    def raylets(self) -> dict[str, psutil.Process]:
        """By Ray's id of the node; the head's is among them."""
        found: dict[str, psutil.Process] = {}
        for process in _below(self.head.pid):
            words = _words(process)
            if words and words[0].endswith("/raylet"):
                found[next(word.partition("=")[2] for word in words if word.startswith("--node_id="))] = process
        return found

    def kill_node(self, node: str) -> None:
        """As when its machine loses power: its daemon and all below it at once."""
        raylet = self.raylets()[node]
        for process in [raylet, *raylet.children(recursive=True)]:
            _kill(process)


def _config(address: str, slots: int, most: int, labels: Mapping[str, str]) -> dict[str, Any]:
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    provider = {"type": "external", "module": PROVIDER, "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID, "gcs_address": address}
    resources = {"CPU": slots, "object_store_memory": OBJECT_STORE_BYTES}
    worker = {"resources": resources, "node_config": {}, "labels": dict(labels), "min_workers": 0, "max_workers": most}
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    empty: dict[str, Any] = {key: {} for key in ("auth", "file_mounts")}
    lists = ("setup_commands", "initialization_commands", "head_setup_commands", "worker_setup_commands", "cluster_synced_files")
    empty |= {key: [] for key in (*lists, "head_start_ray_commands", "worker_start_ray_commands", "rsync_exclude", "rsync_filter")}
    return empty | {
        "cluster_name": "fleet", "max_workers": most, "provider": provider, "head_node_type": "ray.head.default", "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60, "available_node_types": {"ray.head.default": head, KIND: worker},
        "file_mounts_sync_continuously": False,
    }  # fmt: skip


@contextmanager
def autoscaled(folder: Path, slots: int = 1, most: int = 4, labels: Mapping[str, str] | None = None) -> Iterator[Autoscaled]:
    """A cluster of up to ``most`` nodes for ``slots`` ranks each. ``folder``: for its logs and sockets; its path must be short."""
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    address = f"{HOST}:{free_port(HOST)}"
    config = folder / "autoscaling.json"
    config.write_text(json.dumps(_config(address, slots, most, labels or {})))
    own = {"RAY_AUTH_MODE": "disabled"}
    fake = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1"}
    fake |= {"RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={address.rpartition(':')[2]}"]
    command += [f"--node-ip-address={HOST}", "--num-cpus=0", f"--autoscaling-config={config}", "--include-dashboard=false"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder}", "--dashboard-agent-listen-port=0"]
    with (folder / "head.log").open("ab") as log:
        head = subprocess.Popen(command, env={**os.environ, **own, **fake}, stdout=log, stderr=log, start_new_session=True)
    cluster = Autoscaled(address, head, own)
    try:
        until(lambda: head.poll() is None and bool(cluster.raylets()), "the head is up", 90)
        yield cluster
    finally:
        _end(head)


def _end(head: subprocess.Popen[bytes]) -> None:
    """All that it has started, by PID: SIGTERM would have it wait for half a minute."""
    if head.poll() is None:
        os.kill(head.pid, signal.SIGSTOP)  # it must not start anything more
    for process in [*_below(head.pid), psutil.Process(head.pid)]:
        _kill(process)
    head.wait()


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True) if psutil.pid_exists(pid) else []


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
