"""A Ray cluster on this machine whose nodes can be lost and replaced one by one: a head for coordination, and nodes for ranks."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fleet.app.cluster.quiet import connect
from fleet.app.cluster.ray_internals import SYSTEM_CONFIG, has_token, reread_authentication
from fleet.errors import ConfigError, RunFailed
from fleet.host import processes
from fleet.protocol.provider import FOLDER_PREFIX, MEMORY, NodePlace
from fleet.settings.per_rank import VISIBLE

RANK_RESOURCE = "fleet_rank"
"""Custom resource of worker nodes: one unit for each slot."""
HEAD = "head"
HOST = "127.0.0.1"
ZYGOTE_FILE = "zygote.sock"
OBJECT_STORE_BYTES = 80 * 2**20

Zygote = Callable[[Path, Mapping[str, str]], subprocess.Popen[bytes]]
"""Starts the zygote, at a path and with an environment. The zygote ends when its standard input is closed."""

_HOST = f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); from fleet.app.cluster.node_host import main; main()"


def node_resource(index: int) -> str:
    """Custom resource that only node ``index`` has, for placing an actor on it."""
    return f"fleet_node_{index}"


class NodeGpus:
    """This machine's GPUs, by their ids in ``CUDA_VISIBLE_DEVICES``. Each worker node takes the same number, and no two share one."""

    def __init__(self, gpus: Sequence[str], nodes: int) -> None:
        self.per_node = len(gpus) // nodes
        self._free = list(gpus)
        self._taken: dict[str, list[str]] = {}

    def take(self, node: str) -> str:
        """Ids for a node that comes up, joined by commas."""
        self._taken[node], self._free = self._free[: self.per_node], self._free[self.per_node :]
        return ",".join(self._taken[node])

    def give_back(self, node: str) -> None:
        """Free the GPUs of a node that is gone."""
        self._free += self._taken.pop(node, [])


class LocalCluster:
    """Context manager: a head without CPUs and ``nodes`` worker nodes, each a raylet with a process tree of its own.

    Implements ``fleet.protocol.provider.Cluster``. The nodes end with this process, however it ends. Not for use from several
    threads at once, except ``stop``.

    Args:
        nodes: worker nodes to start with.
        slots_per_node: units of ``RANK_RESOURCE`` on each worker node.
        labels: Ray's labels of the first worker nodes, by index; a run rehearses the loss of a rack with them.
        gpus: ids of this machine's GPUs, as in ``CUDA_VISIBLE_DEVICES``; the worker nodes divide them equally.
        gpus_per_rank: GPUs that a rank takes.
        start_limit_s: how long a node may take to come up.
        zygote: starts the zygote while the nodes come up; the workers of all nodes are forked off it.

    Raises:
        ConfigError: the system is not Linux, or a number is impossible.
        RunFailed: a node did not come up; its log is quoted.
    """

    shares_folders, head = True, HOST

    def __init__(
        self,
        nodes: int,
        slots_per_node: int = 1,
        *,
        labels: Sequence[Mapping[str, str]] = (),
        gpus: Sequence[str] = (),
        gpus_per_rank: float = 0.0,
        start_limit_s: float = 120.0,
        zygote: Zygote | None = None,
    ) -> None:
        _check(nodes, slots_per_node)
        self._slots_per_node = slots_per_node
        self._labels = dict(enumerate(labels))
        self._start_limit_s = start_limit_s
        self._start_zygote = zygote
        self._zygote: subprocess.Popen[bytes] | None = None
        self._initial_nodes = nodes
        self.id = secrets.token_hex(6)
        """Marks this cluster's processes, see ``fleet.host.processes``."""
        self._hosts: dict[str, subprocess.Popen[str]] = {}
        self._next_index = 0
        self._lock = threading.RLock()  # stop() may come from a signal handler while this thread holds it
        self._directory = Path()
        self._replaced: dict[str, str | None] = {}
        self._stopped = True
        self.address, self.head_raylet = "", 0
        """``host:port`` of the cluster, for ``ray.init``, and the process of Ray's daemon on the head."""
        self.slot = {RANK_RESOURCE: 1.0} | ({"GPU": gpus_per_rank} if gpus_per_rank else {})
        self.selector: Mapping[str, str] = {}
        self._gpus = NodeGpus(gpus, nodes)

    def start(self) -> LocalCluster:
        """Bring all nodes up. On any error everything that was started is stopped."""
        self._stopped = False
        atexit.register(self.stop)
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="flt-", dir="/tmp"))  # a short path: unix sockets have 107 characters
            self._authenticate()
            if self._start_zygote is not None:
                self._zygote = self._start_zygote(self._directory / ZYGOTE_FILE, {**self.head_environment, **processes.NOT_YET})
            self._launch(HEAD, self._head_settings())
            answer = self._await(HEAD)
            self.address, self.head_raylet = answer["address"], int(answer["raylet"])
            self._add_many(self._initial_nodes)
        except BaseException:
            self.stop()
            raise
        return self

    def connect(self, imports_from: Sequence[str] = (), **arguments: Any) -> None:
        """``ray.init`` of this process with this cluster, quiet; see ``fleet.app.cluster.quiet``."""
        connect(self.address, imports_from, **arguments)

    @property
    def directory(self) -> Path:
        """Where Ray keeps this cluster's sockets and logs; removed by ``stop``."""
        return self._directory

    def alive(self) -> Sequence[int]:
        """Indices of the worker nodes whose host runs."""
        return sorted(int(name) for name, host in list(self._hosts.items()) if name != HEAD and host.poll() is None)

    def place(self, index: int, limit_s: float = 30.0) -> NodePlace:
        import ray

        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            for node in ray.nodes():
                if node["Alive"] and node_resource(index) in node["Resources"]:
                    labels = {str(name): str(value) for name, value in node["Labels"].items()}
                    return NodePlace(str(node["NodeID"]), HOST, f"{socket.gethostname()}/{index}", labels)
            time.sleep(0.1)
        raise RunFailed(f"node {index} of the local cluster is not known to Ray after {limit_s:g} s")

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=MEMORY))

    def lose(self, index: int) -> str | None:
        """SIGKILL all processes of a node at once, as a power failure would. Returns None, or why some are left."""
        with self._lock:
            host = self._hosts.get(str(index))
            if host is None:
                return f"node {index} is not up: the nodes are {list(self.alive())}"
            left = processes.kill_all(self.id, str(index))
            self._reap(str(index))
            return f"processes {left} of node {index} outlived SIGKILL" if left else None

    def add(self) -> int:
        """Start another node; returns its index, which was never used before."""
        with self._lock:
            return self._add_many(1)[0]

    def pids(self, index: int | None = None) -> list[int]:
        """Live processes of one node, or of the whole cluster."""
        return processes.find(self.id, None if index is None else str(index))

    def stop(self) -> None:
        """End every process of the cluster and remove its directory. May be called at any time, and again."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            atexit.unregister(self.stop)
            self._disconnect()
            left = processes.kill_all(self.id)
            for name in list(self._hosts):
                self._reap(name)
            if self._zygote is not None:
                self._end(self._zygote, "the zygote of all nodes")
                self._zygote = None
            self._restore_environment()
            shutil.rmtree(self._directory, ignore_errors=True)
        if left:
            raise RunFailed(f"processes {left} of the local cluster outlived SIGKILL")

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _add_many(self, count: int) -> list[int]:
        """Start nodes side by side: each mostly waits for its own processes."""
        indices = list(range(self._next_index, self._next_index + count))
        self._next_index += count
        for index in indices:
            self._launch(str(index), self._node_settings(index))
        for index in indices:
            self._await(str(index))
        return indices

    def _launch(self, name: str, settings: dict[str, Any]) -> None:
        environment = self._environment(name)
        if name != HEAD and self._gpus.per_node:
            environment[VISIBLE] = self._gpus.take(name)
        with open(self._directory / f"host-{name}.log", "wb") as log:
            self._hosts[name] = subprocess.Popen(
                [sys.executable, "-c", _HOST, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal is for this process, which then stops the nodes in order
                text=True,
            )

    def _environment(self, node: str) -> dict[str, str]:
        zygote = str(self._directory / ZYGOTE_FILE) if self._zygote is not None else ""
        marks = {processes.CLUSTER_VARIABLE: self.id, processes.NODE_VARIABLE: node, processes.ZYGOTE_VARIABLE: zygote}
        return {**os.environ, **marks}

    @property
    def head_environment(self) -> dict[str, str]:
        """Variables of processes on the head node."""
        return self._environment(HEAD)

    def _await(self, name: str) -> dict[str, str]:
        host = self._hosts[name]
        assert host.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            host.kill()  # unblocks the read below

        timer = threading.Timer(self._start_limit_s, give_up)
        timer.start()
        try:
            line = host.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            log = (self._directory / f"host-{name}.log").read_text(errors="replace")
            why = f"within {self._start_limit_s:g} s" if late.is_set() else "as its process has ended; its last lines follow"
            raise RunFailed(f"node {name} of the local cluster did not come up {why}", log[-3000:])
        answer: dict[str, str] = json.loads(line)
        return answer

    def _reap(self, name: str) -> None:
        self._gpus.give_back(name)
        self._end(self._hosts.pop(name), f"the host of node {name}")

    def _end(self, process: subprocess.Popen[Any], what: str) -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{what} (process {process.pid}) outlived SIGKILL") from None

    def _common_settings(self, name: str) -> dict[str, Any]:
        return {
            "temp_dir": str(self._directory),
            "plasma_store_socket_name": str(self._directory / f"p{name}"),  # Ray's own choice of names races between nodes
            "raylet_socket_name": str(self._directory / f"r{name}"),
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_gpus": self._gpus.per_node if name != HEAD else 0,
            "min_worker_port": 0,
            "max_worker_port": 0,
            "include_log_monitor": False,
            "dashboard_agent_listen_port": None,
        }

    def _head_settings(self) -> dict[str, Any]:
        return {
            **self._common_settings(HEAD),
            "num_cpus": 0,
            "include_dashboard": False,
            "dashboard_port": 0,
            "no_monitor": True,
            "_system_config": SYSTEM_CONFIG,
        }

    def _node_settings(self, index: int) -> dict[str, Any]:
        return {
            **self._common_settings(str(index)),
            "gcs_address": self.address,
            "num_cpus": self._slots_per_node,
            "resources": {RANK_RESOURCE: self._slots_per_node, node_resource(index): 1},
            "labels": dict(self._labels.get(index, {})),
        }

    def _authenticate(self) -> None:
        """Protect the cluster with Ray's token, unless the user chose otherwise: any local user could run code in it.

        The cluster uses the user's token (environment or home directory), so that Ray's command line works with it. Without one, the
        cluster has a token of its own, which this process and its children know.
        """
        if os.environ.get("RAY_AUTH_MODE") is not None:
            return
        if not has_token():
            self._set_variable("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._set_variable("RAY_AUTH_MODE", "token")
        reread_authentication()

    def _set_variable(self, variable: str, value: str) -> None:
        self._replaced[variable] = os.environ.get(variable)
        os.environ[variable] = value

    def _restore_environment(self) -> None:
        for variable, value in self._replaced.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        if self._replaced:
            reread_authentication()
        self._replaced.clear()

    def _disconnect(self) -> None:
        """Ray ends a driver whose node goes away, so this process leaves first."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address:
            ray.shutdown()


def _check(nodes: int, slots_per_node: int) -> None:
    if not sys.platform.startswith("linux"):
        raise ConfigError("platform", sys.platform, "the local cluster finds its processes through /proc", "Use Linux, or a container.")
    if nodes < 1:
        raise ConfigError("nodes", nodes, "ranks need a node to run on", "Set it to 1 or more.")
    if slots_per_node < 1:
        raise ConfigError("slots_per_node", slots_per_node, "a node without slots holds no rank", "Set it to 1 or more.")
