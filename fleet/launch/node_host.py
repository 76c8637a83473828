"""One Ray node of a local cluster, hosted by one small process; see ``fleet.launch.local``.

It starts the node's daemons, prints one line of JSON, and waits until its standard input closes or the raylet ends; then it kills what
is left of the node. So when the launcher dies, however it dies, the node goes with it. Left alone, Ray's agents would live on for a
minute, because they try to tell the head, and the workers of a raylet that nobody reaps for as long as they like.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private import workers as rays_workers
from ray._private.node import Node
from ray._private.parameter import RayParams

from fleet.launch import lean_agent, processes, setup_worker


class _Headless(Node):
    """A node without Ray's API server and without the part of the agents that serves it: 70 MB and some seconds less."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        self._webui_url = None


_interpreter = services._build_python_executable_command_memory_profileable


def _with_lean_agents(component: str, *arguments: Any, **options: Any) -> list[str]:
    """The command that runs a script of Ray's."""
    command: list[str] = _interpreter(component, *arguments, **options)
    return [*command, lean_agent.__file__] if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT else command


def start(settings: dict[str, Any], dashboard: bool) -> Node:
    """Start the node's processes; returns when the node has registered with the cluster."""
    if not dashboard:
        ray._private.utils.get_dashboard_dependency_error = lambda: ImportError("switched off")  # agents start with --minimal
        services._build_python_executable_command_memory_profileable = _with_lean_agents
    node_class = Node if dashboard else _Headless
    head = settings.get("gcs_address") is None
    os.environ[setup_worker.RAYS] = str(Path(rays_workers.__file__).parent / ray_constants.SETUP_WORKER_FILENAME)
    parameters = RayParams(**settings, setup_worker_path=setup_worker.__file__)
    return node_class(parameters, head=head, shutdown_at_exit=False, spawn_reaper=True)


def main() -> None:
    """Host the node that the first argument describes, as JSON, until standard input closes."""
    request = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints goes to the log, so that the answer is the only line
    node = start(request["settings"], request["dashboard"])
    print(json.dumps({"address": node.gcs_address, "node_id": node.node_id}), file=out, flush=True)
    raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process
    ended = select.select([sys.stdin, os.pidfd_open(raylet.pid)], [], [])[0]
    raylet.poll()  # reaps it
    processes.kill_all(os.environ[processes.CLUSTER_VARIABLE], os.environ[processes.NODE_VARIABLE])
    if sys.stdin in ended and node.is_head():
        shutil.rmtree(request["settings"]["temp_dir"], ignore_errors=True)
