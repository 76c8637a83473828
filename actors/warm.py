"""Worker processes that are up before they are wanted: one on each node, so that a lost rank is replaced in half a second, not in four.

A new worker spends its time on starting Python and on imports. Ray can start workers ahead of time, for its own use, through a call of
its raylets; nothing promises that call, so whatever goes wrong with it is logged, and replacements start cold as ever.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray.core.generated.common_pb2 import PYTHON
from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from fleet.clock import unix_time_s

log = logging.getLogger("ray.train.fleet")

MODULES_VARIABLE = "FLEET_WARM_MODULES"
"""Comma-separated names of modules to import."""
ALWAYS = ("ray.train.v2._internal.execution.worker_group.worker", "actors.trainer")
NAMESPACE = b"fleet_warm"
QUIET_S = 5.0
"""Workers that join are given so long before another process competes with them for the node's cores."""
LOOK_S = 2.0
KEEP_S = 3600
CALL_LIMIT_S = 10.0
IDLE_LIMIT_S = 60.0
"""On a machine without an idle moment a worker that was started ahead of time imports at normal priority after so long."""


def environment(modules: tuple[str, ...]) -> dict[str, str]:
    """Variables of a worker's environment that make it import ``modules`` at its start."""
    return {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: f"{__name__}.{warm_up.__name__}", MODULES_VARIABLE: ",".join((*ALWAYS, *modules))}


def warm_up() -> None:
    """Import what the environment names: at once in a worker that is waited for, beside the ranks in one that is started ahead of time."""
    if _internal_kv_del(_ahead_key(ray.get_runtime_context().get_node_id()), namespace=NAMESPACE):
        behind = threading.Thread(target=_import_when_idle, name="fleet-warm-up", daemon=True)
        behind.start()
        behind.join(IDLE_LIMIT_S)
    _import_all()


def _import_when_idle() -> None:
    """Imports take seconds of CPU, and ranks compute beside them. In a thread of its own, as without privileges nothing undoes this."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    _import_all()


def _import_all() -> None:
    """A module that is missing is the train function's to complain about."""
    for name in os.environ[MODULES_VARIABLE].split(","):
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.info("%s could not be imported ahead of time: %s", name, error)


def _ahead_key(node: str) -> bytes:
    """Held in the cluster while a worker that is to start ahead of time on ``node`` has not shown up there."""
    return f"ahead-{node}".encode()


class WarmWorkers:
    """Keeps one idle worker on each node that has room for ranks. Lives in the controller's process, in a thread of its own.

    What is in stock is written in the cluster, so that the runs of a job, one after the other, share it.

    Args:
        resources: what a rank takes; nodes without it are left alone.
        runtime_env: a worker's runtime environment as Ray writes it; only workers of the very same one are of use.
    """

    def __init__(self, resources: dict[str, float], runtime_env: str) -> None:
        self._resources = resources
        self._job = ray.get_runtime_context().get_job_id()
        self._request = PrestartWorkersRequest(
            language=PYTHON, job_id=bytes.fromhex(self._job), num_workers=1, keep_alive_duration_secs=KEEP_S
        )  # fmt: skip
        self._request.runtime_env_info.serialized_runtime_env = runtime_env
        self._digest = hashlib.blake2b(runtime_env.encode(), digest_size=8).hexdigest()
        self._quiet_until_s = time.monotonic() + QUIET_S
        self._over = threading.Event()
        threading.Thread(target=self._run, name="fleet-warm-workers", daemon=True).start()

    def taken(self, nodes: Iterable[str]) -> None:
        """Workers came up on ``nodes``: they took what was in stock there."""
        self._quiet_until_s = time.monotonic() + QUIET_S
        for node in nodes:
            _internal_kv_put(self._key(node), b"0", namespace=NAMESPACE)

    def stop(self) -> None:
        """Start no more of them."""
        self._over.set()

    def _key(self, node: str) -> bytes:
        return f"{self._job}-{self._digest}-{node}".encode()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            if time.monotonic() >= self._quiet_until_s:
                self._stock()

    def _stock(self) -> None:
        for facts in ray.nodes():
            key = self._key(facts["NodeID"])
            stocked_s = float(_internal_kv_get(key, namespace=NAMESPACE) or 0.0)
            if self._has_room(facts) and unix_time_s() - stocked_s > KEEP_S:
                _internal_kv_put(key, str(unix_time_s()).encode(), namespace=NAMESPACE)
                _internal_kv_put(_ahead_key(facts["NodeID"]), b"1", namespace=NAMESPACE)
                self._start(f"{facts['NodeManagerAddress']}:{facts['NodeManagerPort']}")

    def _has_room(self, facts: dict[str, Any]) -> bool:
        total = facts["Resources"]
        return facts["Alive"] and all(total.get(name, 0.0) >= amount for name, amount in self._resources.items())

    def _start(self, address: str) -> None:
        try:
            with init_grpc_channel(address, asynchronous=False) as channel:
                NodeManagerServiceStub(channel).PrestartWorkers(self._request, timeout=CALL_LIMIT_S)
        except grpc.RpcError as error:
            log.info("No worker could be started ahead of time at %s: %s", address, error)
