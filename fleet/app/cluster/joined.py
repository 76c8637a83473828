"""A Ray cluster that was there before the run, and is there after it. Others may use it at the same time."""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fleet.app.cluster import parcel, probe
from fleet.app.cluster.ray_internals import free_by_node
from fleet.app.cluster.reach import join
from fleet.errors import ConfigError, RunFailed
from fleet.host import tls
from fleet.host.clock import unix_time_s
from fleet.protocol.provider import FOLDER_PREFIX, MEMORY, NAMESPACE, NodePlace
from fleet.settings.per_rank import meets, room

SLOT = {"CPU": 1.0}
"""Resources of Ray that one rank takes."""
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable in jobs of ``ray job submit``. Such a job has a runtime environment already."""


@dataclass
class JoinedCluster:
    """Connects this process to a cluster, and numbers its nodes as they come. Implements ``fleet.protocol.provider.Cluster``.

    A lost node keeps its index. A node that comes back is a new node to Ray, and gets a new index. Use as a context manager.

    Args:
        address: ``auto`` (of the node that this process is on), or ``HOST:PORT`` of the head.
        slot: resources of Ray that one rank takes.
        selector: conditions on Ray's labels of the nodes that ranks may be on, by key; see ``fleet.settings.per_rank``.
        code: the runtime environment that brings this process's code to the nodes; None: they have the code.
        metadata: metadata of this process's job, which Ray's API shows: texts by name.
    """

    address: str
    slot: Mapping[str, float] = field(default_factory=lambda: SLOT)
    selector: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    lose_node: Callable[[int], str | None] = lambda index: f"node {index} has no agent"
    """Makes a node fail for this run, for chaos; returns why not, or None. The cluster and other users' processes stay untouched."""
    shares_folders = False

    def __post_init__(self) -> None:
        self._indices: dict[str, int] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()

    def connect(self) -> JoinedCluster:
        """Raises ConfigError: no cluster is there, or it has another version of Ray or of Python."""
        import ray

        if ray.is_initialized():
            raise ConfigError("--address", self.address, "this process is connected to a Ray cluster already", "Call ray.shutdown() first.")
        from ray.job_config import JobConfig

        job = JobConfig(metadata=dict(self.metadata))
        join(self.address, namespace=NAMESPACE, runtime_env=dict(self.code or {}), job_config=job)
        return self

    def __enter__(self) -> JoinedCluster:
        return self.connect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        import ray

        ray.shutdown()

    @property
    def head(self) -> str:
        return next((str(node["NodeManagerAddress"]) for node in nodes() if is_head(node)), "")

    def alive(self) -> Sequence[int]:
        """Indices of the nodes that have room for a rank when they are empty. Other nodes are no workers."""
        found = [str(node["NodeID"]) for node in chosen(self.selector) if room(node["Resources"], self.slot) >= 1]
        with self._lock:
            for name in found:
                self._indices.setdefault(name, len(self._indices))
            return sorted(self._indices[name] for name in found if self._indices[name] not in self._lost)

    def index_of(self, node_id: str) -> int | None:
        """The index of a node of Ray's, if it has one."""
        return self._indices.get(node_id)

    def place(self, index: int, limit_s: float = 30.0) -> NodePlace:
        node_id = next((name for name, number in self._indices.items() if number == index), "")
        found = next((node for node in nodes() if node["NodeID"] == node_id), None)
        if found is None:
            raise RunFailed(f"node {index} has left the cluster at {self.address}")
        address, labels = str(found["NodeManagerAddress"]), {str(name): str(value) for name, value in found["Labels"].items()}
        return NodePlace(node_id, address, str(found.get("NodeName") or address), labels)

    def folder(self) -> Path:
        """The path of the run's folder on each node; the agent there makes it."""
        return MEMORY / f"{FOLDER_PREFIX}{secrets.token_hex(6)}"

    def lose(self, index: int) -> str | None:
        """End all that this run has on the node at once, as if the node failed. Nothing else there is touched."""
        refused = self.lose_node(index)
        if refused is None:
            with self._lock:
                self._lost.add(index)
        return refused

    def add(self) -> int:
        """Take back the node that was lost first, as a new node."""
        with self._lock:
            if not self._lost:
                raise RunFailed(f"the cluster at {self.address} has no other node, and Fleet starts none there")
            index = min(self._lost)
            self._lost.discard(index)
            name = next(name for name, number in self._indices.items() if number == index)
            self._indices[name] = len(self._indices) + len(self._lost)
            return self._indices[name]


def nodes() -> list[dict[str, Any]]:
    """Ray's nodes that are alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def is_head(node: Mapping[str, Any]) -> bool:
    """Whether the control plane lives on this node."""
    return "node:__internal_head__" in node["Resources"]


def chosen(selector: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ray's nodes that are alive, and whose labels are as asked."""
    return [node for node in nodes() if meets(node["Labels"], selector)]


def rooms(slot: Mapping[str, float], selector: Mapping[str, str]) -> list[tuple[str, int, int]]:
    """(address, ranks that have room now, ranks that have room when it is empty) of each node that has such resources."""
    now = free_by_node()
    found = [(node, room(now.get(node["NodeID"], {}), slot), room(node["Resources"], slot)) for node in chosen(selector)]
    return [(str(node["NodeManagerAddress"]), free, total) for node, free, total in found if total]


def in_words(slot: Mapping[str, float], selector: Mapping[str, str]) -> str:
    """The resources that a rank takes, and the ranks that each node has room for."""
    takes = ", ".join(f"{amount:g} {name}" for name, amount in slot.items())
    where = "".join(f", where {key}={condition}" for key, condition in selector.items())
    there = "; ".join(f"{address}: {free} of {total} free" for address, free, total in rooms(slot, selector))
    return f"each takes {takes}{where} ({there or 'no node has such resources'})"


def check_room(slots: int, slot: Mapping[str, float], selector: Mapping[str, str], name: str, group: int = 1) -> None:
    """Raises ConfigError when too few slots are free for run ``name``. It names the free slots, and the runs that hold the rest.

    Also when no node has room for a ``group`` of ranks that compute a shard together.
    """
    _check_labels(selector)
    there = rooms(slot, selector)
    check_group(group, max((total for _, _, total in there), default=group))
    free = sum(each[1] for each in there)
    if free >= slots:
        return
    holders = ", ".join(sorted({each.removeprefix("run-") for each in run_names()} - {name})) or "no run of Fleet"
    reason = f"the cluster has room for {free} ranks, {in_words(slot, selector)}; the rest is held by {holders}, or by others"
    raise ConfigError("--world and --spares", slots, reason, "Ask for fewer, wait for what runs there, or add nodes.")


def check_group(group: int, most: int) -> None:
    """Raises ConfigError when ``most``, the ranks that a node has room for at the most, are fewer than a group."""
    if most < group:
        reason = f"no node has room for the {group} ranks that compute a shard together: a node has room for {most}"
        raise ConfigError("mesh", group, reason, "Take a smaller axis, or larger nodes: on this machine fewer --nodes.")


def _check_labels(selector: Mapping[str, str]) -> None:
    """Raises ConfigError with the first condition that no node meets, and the nodes' values of that label."""
    there = nodes()
    for key, condition in selector.items():
        if not any(meets(node["Labels"], {key: condition}) for node in there):
            values = ", ".join(sorted({node["Labels"][key] for node in there if key in node["Labels"]}))
            reason = f"no node meets it: {f'their values of {key} are {values}' if values else f'none has a label {key}'}"
            raise ConfigError("per_rank.labels", f"{key}={condition}", reason, "See ray list nodes, and ray start --labels.")


def run_names() -> list[str]:
    """The named actors of Fleet's runs on this cluster."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return [str(each["name"]) for each in found if each["namespace"] == NAMESPACE and str(each["name"]).startswith("run-")]


def environment(folder: Path | None) -> dict[str, Any]:
    """The runtime environment that travels to a cluster's nodes: Fleet itself, and the code in ``folder``.

    A submitted job has an environment with a working directory already. Raises ConfigError when the code is too large.
    """
    travels: dict[str, Any] = {"py_modules": parcel.packages()}
    if SUBMITTED in os.environ:
        kept = json.loads(os.environ[SUBMITTED]).get("runtime_env", {})
        return travels if "py_modules" not in kept else {}
    if folder is not None:
        travels |= {"working_dir": parcel.checked(folder), "excludes": list(parcel.EXCLUDED)}
    return travels


def top_of(folder: Path | None) -> Path | None:
    """The folder here that becomes the working directory of ranks: ``folder``, as :func:`environment` takes it, or the job's."""
    return Path.cwd() if SUBMITTED in os.environ else folder


def examine(places: Mapping[int, NodePlace], tls_folder: str = "") -> None:
    """Ask every node whether it can train, and encrypt as this host does where that is wanted. Raises ConfigError naming the first that
    cannot."""
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(probe)
    try:
        ask = ray.remote(num_cpus=0, max_retries=0)(probe.facts)
        began_s = unix_time_s()
        calls = {
            index: ask.options(scheduling_strategy=_pinned(place.id)).remote(probe.MODULES, probe.MEMORY, tls_folder)
            for index, place in places.items()
        }
    finally:
        cloudpickle.unregister_pickle_by_value(probe)
    found: dict[str, probe.NodeFacts] = {}
    for index, call in calls.items():
        where = places[index].host
        try:
            answer = ray.get(call, timeout=max(1.0, began_s + probe.LIMIT_S - unix_time_s()))
        except (ray.exceptions.RayError, TimeoutError) as error:
            words = " ".join(str(error).split())[:300] or f"no answer within {probe.LIMIT_S:g} s"
            raise ConfigError(
                "node", where, f"no process could be started there: {words}", "See ray list nodes, and that node's logs."
            ) from error
        found[where] = probe.NodeFacts(**answer, asked_s=began_s, answered_s=unix_time_s())
    probe.judge(found, platform.python_version())
    if tls_folder:
        _check_authorities(tls_folder, {host: each.authority for host, each in found.items()})


def _check_authorities(tls_folder: str, found: Mapping[str, str]) -> None:
    """By host, whom it trusts: each as this one, the head. Raises ConfigError."""
    try:
        own = tls.identity(tls_folder).authority
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"the head: {error.reason}", error.way_out) from error
    tls.check_same(tls_folder, {"the head": own, **found})


def _pinned(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)
