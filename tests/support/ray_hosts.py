"""Ray on hosts of one machine: ``ray start`` on each, as users do it, with Ray's own time limits."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.hosts import Host, Hosts
from tests.support.waiting import until

START_S = 120.0
BOOTS = 3
"""A node that is not known to the head after 30 s gives up, and on a machine with much to do that happens: it is tried so often."""
GCS_PORT, DASHBOARD_PORT, ENVIRONMENT_PORT = 6379, 8265, 8267
OBJECT_STORE_BYTES = 80 * 2**20
TOKEN_FILE = ".ray/auth_token"
"""In the home folder: where Ray looks for the token by itself."""

_SESSION = """
import json, ray
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
state = GlobalState()
state._initialize_global_state(GcsClientOptions.create({address!r}, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True))
print(json.dumps(state.node_table()))
"""

_REMOVE = """
import grpc
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.common_pb2 import NodeDeathInfo
from ray.core.generated.gcs_service_pb2 import UnregisterNodeRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
why = NodeDeathInfo(reason=NodeDeathInfo.UNEXPECTED_TERMINATION, reason_message="removed by a test")
stub = NodeInfoGcsServiceStub(init_grpc_channel({address!r}))
for node in {nodes!r}:
    try:
        stub.UnregisterNode(UnregisterNodeRequest(node_id=bytes.fromhex(node), node_death_info=why), timeout=10)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
"""
"""Of a node that is dead by now Ray says nothing at all."""


@dataclass(frozen=True)
class Head:
    """A running head and what a user needs to reach it. ``env`` are variables for every process that speaks to the cluster."""

    host: Host
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """For ``ray.init``, ``ray start`` and ``--address``."""
        return f"{self.host.address}:{GCS_PORT}"

    @property
    def dashboard_url(self) -> str:
        """For ``ray job submit``, where the head was started with the dashboard."""
        return f"http://{self.host.address}:{DASHBOARD_PORT}"

    def nodes(self) -> list[dict[str, Any]]:
        """Ray's table of nodes, dead ones included: ``NodeID``, ``Alive``, ``NodeManagerAddress``, ``Labels``, ``Resources``."""
        found: list[dict[str, Any]] = json.loads(self.script(_SESSION.format(address=self.address)).splitlines()[-1])
        return found

    def alive(self) -> list[str]:
        """Addresses of the nodes that Ray holds for alive, in order."""
        return sorted(node["NodeManagerAddress"] for node in self.nodes() if node["Alive"])

    def remove(self, worker: Host) -> None:
        """Have Ray declare every node at a host's address dead, whether it answers or not. A daemon that hears of it ends itself.

        Raises:
            RuntimeError: Ray refused, or still holds the node for alive.
        """
        nodes = [node["NodeID"] for node in self.nodes() if node["Alive"] and node["NodeManagerAddress"] == worker.address]
        self.script(_REMOVE.format(address=self.address, nodes=nodes))
        if left := [node["NodeID"] for node in self.nodes() if node["Alive"] and node["NodeID"] in nodes]:
            raise RuntimeError(f"Ray holds {left} of {worker.hostname} for alive")

    def script(self, text: str, timeout_s: float = START_S, on: Host | None = None) -> str:
        """Run Python on the head, or on another host; returns what it prints.

        Raises:
            RuntimeError: it failed; its output is quoted.
        """
        host = on or self.host
        return host.run([host.python, "-c", textwrap.dedent(text)], timeout_s, env=self.env).stdout


def ray_head(
    host: Host,
    *,
    num_cpus: int = 0,
    labels: Mapping[str, str] | None = None,
    resources: Mapping[str, float] | None = None,
    dashboard: bool = False,
    token: str = "",
) -> Head:
    """Start a cluster's head; returns when it serves.

    Args:
        host: where; it sees the source tree if a user shall type there.
        num_cpus: what Ray may schedule there; none, as is usual for a head.
        labels: Ray's labels of the node.
        resources: its custom resources.
        dashboard: serve the dashboard, which ``ray job submit`` needs; it takes some seconds and 200 MB.
        token: a token that everyone who speaks to the cluster must show; written where Ray looks for it, on the head and on workers.
    """
    head = Head(host, {"RAY_AUTH_MODE": "token"} if token else {})
    if token:
        _give_token(host, token)
    shown = ["--include-dashboard=true", "--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD_PORT}"]
    options = ["--head", f"--port={GCS_PORT}", f"--runtime-env-agent-port={ENVIRONMENT_PORT}"]
    _start(head, host, [*options, *(shown if dashboard else ["--include-dashboard=false"])], num_cpus, labels, resources)
    return head


def ray_worker(
    host: Host, head: Head, *, num_cpus: int = 2, labels: Mapping[str, str] | None = None, resources: Mapping[str, float] | None = None
) -> None:
    """Start Ray on a host and join the cluster; returns when the node has registered. Arguments as for :func:`ray_head`."""
    if head.env:
        _give_token(host, head.host.run(["cat", TOKEN_FILE]).stdout)
    _start(head, host, [f"--address={head.address}"], num_cpus, labels, resources)


def ray(host: Host) -> list[str]:
    """The command ``ray`` on a host: its script names a Python of another folder."""
    return [host.python, "-m", "ray.scripts.scripts"]


class RayHosts:
    """A head without CPUs and workers with two each, one a host, to be shared by tests: :meth:`restore` brings them back as they were.

    ``prepare`` is done on each host before Ray is started there, also when it boots again.
    """

    def __init__(self, hosts: Hosts, prepare: Callable[[Host], None] | None = None, **settings: Any) -> None:
        self.hosts, self.workers = hosts, [hosts[index] for index in range(1, len(hosts))]
        self._prepare = prepare or (lambda host: None)
        self._prepare(hosts[0])
        self.head = ray_head(hosts[0], labels={"rack": "a"}, **settings)
        for worker in self.workers:
            self.join(worker)

    def join(self, worker: Host) -> None:
        """Start Ray on a worker, under its label ``rack``: no two have the same."""
        self._prepare(worker)
        ray_worker(worker, self.head, labels={"rack": f"rack-{worker.hostname}"}, resources={worker.hostname: 1})

    def replace(self, worker: Host) -> None:
        """End the host and its node at once, and start both anew: also a node that Ray drains, which no :meth:`restore` sees."""
        for tries_left in reversed(range(BOOTS)):
            worker.kill_all()
            self.head.remove(worker)
            worker.boot()
            try:
                self.join(worker)
                break
            except RuntimeError:
                if not tries_left:
                    raise

    def restore(self) -> None:
        """End cuts and limits, and start what is down again; returns when Ray knows every node once, and no other as alive."""
        self.hosts.mend()
        alive = self.head.alive()  # a process that imports Ray
        for worker in self.workers:
            if not runs_raylet(worker) or worker.address not in alive:
                self.replace(worker)
        everyone = sorted(host.address for host in (self.head.host, *self.workers))
        until(lambda: self.head.alive() == everyone, "each host is one node of Ray", tick_s=1.0)


class TwoRacks(RayHosts):
    """The first two workers in rack a, the others in rack b."""

    def join(self, worker: Host) -> None:
        self._prepare(worker)
        ray_worker(worker, self.head, labels={"rack": "a" if self.workers.index(worker) < 2 else "b"})


def runs_raylet(host: Host) -> bool:
    """Whether Ray's daemon of a node runs on the host."""
    return bool(host.run(["pgrep", "-x", "raylet"], check=False).stdout) if host.alive else False


def _give_token(host: Host, token: str) -> None:
    write = 'umask 077 && mkdir -p "${1%/*}" && cat >"$1"'
    process = host.popen(["sh", "-c", write, "sh", TOKEN_FILE], stdin=-1, text=True)
    process.communicate(token, timeout=START_S)


def _start(
    head: Head, host: Host, options: list[str], num_cpus: int, labels: Mapping[str, str] | None, resources: Mapping[str, float] | None
) -> None:
    options = [f"--node-ip-address={host.address}", f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}", *options]
    if labels:
        options.append("--labels=" + ",".join(f"{name}={value}" for name, value in labels.items()))
    options.append(f"--resources={json.dumps(dict(resources or {}))}")
    host.run([*ray(host), "start", "--disable-usage-stats", *options], START_S, env=head.env)
