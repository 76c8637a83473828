"""All uses of Ray's internals by a cluster. ``actors.ray_internals`` has a run's uses of Ray Train's.

Ray promises none of it. ``tests/contract/test_ray_facts.py`` checks each fact by its name, and ``docs/upgrading.md`` says how to mend one
that does not hold any more. Imports stand inside the functions: a driver does not load the parts that the host of a node needs. (One other
module uses internals: ``fleet.app.cluster.lean_agent``, the main program of a process of Ray's. It imports nothing of Fleet's.)
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.app.cluster import lean_agent, setup_worker

ASKED = "fleet-asks-for-nodes"
"""Name of the placement groups by which runs ask for nodes: no rank is ever placed in one."""
log = logging.getLogger("fleet.app.cluster.ray_internals")
HTTP2_OPENS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A client's first bytes: the preface, and an empty frame of settings (RFC 9113, section 3.4). A server answers with its own settings."""
SYSTEM_CONFIG = {
    # A killed raylet refuses connections, so each check fails at once: the node is dead after period x threshold. A starved raylet
    # answers late: each check waits for the time-out, so that a busy machine does not lose nodes.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 400,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
    "worker_register_timeout_seconds": 30,
    # By default, Ray reads the free memory four times a second in each node, as if each had a machine of its own.
    "memory_monitor_refresh_ms": 1000,
    # By default, Ray's daemons look 5 to 10 times a second for objects to fetch and to free, and for idle workers. Once a second is
    # enough: ranks make no objects. The daemons ask for demand on behalf of an autoscaler, and a local cluster has none.
    "object_manager_timer_freq_ms": 1000,
    "raylet_check_gc_period_milliseconds": 1000,
    "kill_idle_workers_interval_ms": 1000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
    # Ray's default of 15 puts ranks behind everything else on the machine, its own daemons first. Ranks are what the machine is for.
    "worker_niceness": 0,
    # By default, each process reports its calls every second. Only Ray's dashboard shows them, and it does not run here.
    "task_events_report_interval_ms": 0,
}


class HostedNode:
    """One Ray node, whose daemons are children of this process; returns when it has registered with the cluster.

    ``settings`` are Ray's own for a node; without ``gcs_address`` it is the head.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from ray._private import ray_constants
        from ray._private.parameter import RayParams

        _leave_out_dashboard()
        os.environ[setup_worker.RAYS] = rays_setup_worker()
        parameters = RayParams(**settings, setup_worker_path=setup_worker.__file__)
        head = settings.get("gcs_address") is None
        self._node = _node_class()(parameters, head=head, shutdown_at_exit=False, spawn_reaper=True)
        self.raylet = self._node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process
        self.address, self.id, self.is_head = self._node.gcs_address, self._node.node_id, head


def rays_setup_worker() -> str:
    """Path of Ray's own script that a raylet starts for each worker."""
    from ray._private import ray_constants, workers

    return str(Path(workers.__file__).parent / ray_constants.SETUP_WORKER_FILENAME)


def _node_class() -> Any:
    from ray._private.node import Node

    class Headless(Node):  # type: ignore[misc]
        """A node without Ray's API server and without the part of the agents that serves it: 70 MB and some seconds less."""

        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            self._webui_url = None

    return Headless


def _leave_out_dashboard() -> None:
    """Agents start with ``--minimal``, and as :mod:`fleet.app.cluster.lean_agent`."""
    import ray
    from ray._private import ray_constants, services

    command_of: Callable[..., list[str]] = services._build_python_executable_command_memory_profileable

    def with_lean_agents(component: str, *arguments: Any, **options: Any) -> list[str]:
        """The command that runs a script of Ray's."""
        command = command_of(component, *arguments, **options)
        return [*command, lean_agent.__file__] if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT else command

    ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("switched off")
    services._build_python_executable_command_memory_profileable = with_lean_agents


def take_prints(sink: Callable[[dict[str, Any], bool], None]) -> None:
    """``sink`` gets Ray's prints of this process: ``lines`` with the ``pid`` of their source, and whether they go without a prefix."""
    import ray

    ray._private.worker.print_to_stdstream = sink


@contextmanager
def prints_kept() -> Iterator[None]:
    """Ray prints here as before once the block has ended, although ``take_prints`` was called meanwhile."""
    import ray

    before = ray._private.worker.print_to_stdstream
    try:
        yield
    finally:
        ray._private.worker.print_to_stdstream = before


def job_config(imports_from: Sequence[str]) -> Any:
    """A job whose processes find modules in the folders ``imports_from``."""
    from ray.job_config import JobConfig

    return JobConfig(_py_driver_sys_path=list(imports_from))


def has_token() -> bool:
    """Whether the user has a token of Ray's, in the environment or at home."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def reread_authentication() -> None:
    """Let Ray in this process see the environment as it is now."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def take_sigterm(on_signal: Callable[[], object]) -> None:
    """In this worker SIGTERM calls ``on_signal``, in its main thread, and ends nothing.

    Only the main thread may set a handler, and an actor with a loop never gets that thread. Ray's own handler runs within a moment, and
    ends the process by a function that it looks up each time. ``on_signal`` takes the place of that function.
    """
    from ray._private import worker

    def on_sigterm(message: str, exit_code: int = 0) -> None:
        log.debug("%s", message)
        on_signal()

    worker.raise_sys_exit_with_custom_error_message = on_sigterm


def ignored_in(folder: Path, excluded: Sequence[str]) -> Callable[[Path], bool]:
    """A test of a path: whether Ray leaves it behind when it sends ``folder``, by ``excluded``, ``.rayignore`` and ``.gitignore``."""
    from ray._private.runtime_env.packaging import _get_excludes, get_excludes_from_ignore_files

    rules = [_get_excludes(folder, list(excluded)), *get_excludes_from_ignore_files(folder, include_gitignore=True)]
    return lambda path: any(rule(path) for rule in rules)


def uploaded(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Upload the folders of a runtime environment to the cluster, for an actor. Ray itself uploads those of whole jobs alone."""
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    found = dict(environment)
    with tempfile.TemporaryDirectory(prefix="fleet-parcel-") as scratch:
        found = upload_py_modules_if_needed(found, include_gitignore=True, scratch_dir=scratch)
        return dict(upload_working_dir_if_needed(found, include_gitignore=True, scratch_dir=scratch))


def free_by_node() -> dict[str, dict[str, float]]:
    """Ray's id of each node -> the resources that are free there now."""
    import ray

    found: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return found


def held_by_run(limit_s: float = 5.0) -> dict[str, dict[str, dict[str, float]]]:
    """Run of Fleet's -> Ray's id of each node -> the resources that its ranks' places hold there.

    Raises OSError when the control plane does not answer."""
    import ray

    try:
        jobs = ray._private.worker.global_worker.gcs_client.get_all_job_info(timeout=limit_s)
    except ray.exceptions.RpcError as error:
        raise OSError(f"the control plane does not say which jobs there are: {error}") from error
    runs = {job.hex(): facts.config.metadata["fleet_run"] for job, facts in jobs.items() if "fleet_run" in facts.config.metadata}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, group in ray.util.placement_group_table().items():
        run = next((run for job, run in runs.items() if name.endswith(job)), "")
        for index, node in (group["bundles_to_node_id"] or {}).items():
            if run and node and group["state"] != "REMOVED":
                there = found.setdefault(run, {}).setdefault(node, {})
                for resource, amount in group["bundles"][index].items():
                    there[resource] = there.get(resource, 0.0) + amount
    return found


def nodes_of_job() -> set[str]:
    """Ray's ids of the nodes on which this job has actors."""
    import ray

    actors = ray._private.state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
    return {str(facts["Address"]["NodeID"]) for facts in actors.values() if facts["State"] == "ALIVE"}


def places_of_job(asked: bool = False) -> Counter[str]:
    """Ray's id of each node -> the number of this job's places there; those of "" wait for room, or for a node to be given up.

    ``asked``: count only placement groups called ``ASKED``; otherwise, all groups but these.
    """
    import ray

    job = ray.get_runtime_context().get_job_id()  # it ends the id of each of the job's placement groups
    groups = [group for name, group in ray.util.placement_group_table().items() if name.endswith(job) and group["state"] != "REMOVED"]
    mine = [group for group in groups if (group["name"] == ASKED) == asked]
    return Counter(str(node or "") for group in mine for node in (group["bundles_to_node_id"] or {}).values())


def unplaced() -> int:
    """How many of this job's workers have no node."""
    return places_of_job()[""]


def has_autoscaler(limit_s: float = 5.0) -> bool:
    """Whether an autoscaler (version 2) reports to this cluster's control plane. Raises OSError when the control plane does not answer."""
    import ray
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    reply = GetClusterStatusReply()
    try:
        reply.ParseFromString(ray._private.worker.global_worker.gcs_client.get_cluster_status(timeout_s=limit_s))
    except ray.exceptions.RpcError as error:
        raise OSError(f"the control plane does not say whether there is an autoscaler: {error}") from error
    return int(reply.autoscaling_state.autoscaler_state_version) > 0


def draining(limit_s: float = 2.0) -> dict[str, float]:
    """Ray's id of each node that will be taken away -> when, in seconds of Unix time; 0: no time was given.

    ``get_draining_nodes`` has no time-out, and ends this process when the control plane is gone for a minute. So it is called for the times
    alone, right after another answer. Raises OSError when the control plane does not answer.
    """
    import ray
    from ray.core.generated.gcs_pb2 import NodeSnapshot

    try:
        nodes = ray._private.worker.global_worker.gcs_client.get_all_node_info(timeout=limit_s)
    except ray.exceptions.RpcError as error:
        raise OSError(f"the control plane does not say which nodes go: {error}") from error
    if not any(node.state_snapshot.state == NodeSnapshot.DRAINING for node in nodes.values()):
        return {}
    return {str(node): deadline_ms / 1000.0 for node, deadline_ms in ray._private.state.state.get_draining_nodes().items()}


def remove_node(address: str, node_id: str, limit_s: float = 10.0) -> None:
    """Let the control plane at ``address`` declare a node dead now. Its own check of a node that it cannot reach takes a minute.

    Placement groups move, and the node's raylet ends when it hears of it. Raises OSError when the control plane does not answer.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.common_pb2 import NodeDeathInfo
    from ray.core.generated.gcs_service_pb2 import UnregisterNodeRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    why = NodeDeathInfo(reason=NodeDeathInfo.UNEXPECTED_TERMINATION, reason_message="Fleet has lost its agent")
    try:
        with init_grpc_channel(address) as channel:
            request = UnregisterNodeRequest(node_id=bytes.fromhex(node_id), node_death_info=why)
            NodeInfoGcsServiceStub(channel).UnregisterNode(request, timeout=limit_s)
    except grpc.RpcError as error:
        raise OSError(f"the control plane at {address} did not take node {node_id} out: {error}") from error


def answers(address: str, limit_s: float) -> bool:
    """Whether the control store at ``host:port`` reacts to a new connection. A stopped process does not, though its port is open.

    gRPC's library is not used: it keeps threads, and a process that forks must have none.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), limit_s) as line:
            line.settimeout(limit_s)
            line.sendall(HTTP2_OPENS)
            line.recv(1)
    except ConnectionResetError:
        return True  # it wants TLS, and has read that this is none
    except OSError:
        return False
    return True


def parquet_paths(dataset: Any) -> list[str] | None:
    """Where the Parquet files of a ``ray.data.Dataset`` lie, if it reads whole rows of such files and does nothing else; else None."""
    read = dataset._logical_plan.dag
    if type(read).__name__ != "ReadFiles" or read.datasource_name != "ParquetV2":
        return None
    files, scanner = read.input_dependencies[0], read.scanner
    chosen = (files.partition_filter, files.predicate, files.limit, files.projected_columns)
    if any(each is not None for each in (*chosen, scanner.columns, scanner.predicate, scanner.limit)):
        return None
    return [str(path) for path in files.source_paths]
