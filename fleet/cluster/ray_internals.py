"""All that a local cluster uses of Ray's internals. What a run uses of Ray Train's is in ``actors.ray_internals``.

Ray promises none of it: each thing here is a fact that ``tests/contract/test_ray_facts.py`` checks by name, and ``docs/upgrading.md`` tells
what to do when one does not hold any more. Imports stand inside the functions: a driver does not load what the host of a node needs.
(``fleet.cluster.lean_agent`` is the only other one: it is the main program of a process of Ray's, and imports nothing of Fleet's.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleet.cluster import lean_agent, setup_worker

SYSTEM_CONFIG = {
    # A killed raylet refuses connections, so each check fails at once: dead after period x threshold. A starved one answers late:
    # it is given the time-out for every check, so that a busy machine does not lose nodes.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 400,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
    "worker_register_timeout_seconds": 30,
    # Ray looks four times a second how much memory is left, in each node, as if each had a machine of its own.
    "memory_monitor_refresh_ms": 1000,
    # Nor is a second too long for the rest that Ray's daemons look after 5 to 10 times a second: objects to fetch and to free, of which
    # ranks make none, and workers without work. Demand is asked for on behalf of an autoscaler, and a local cluster has none.
    "object_manager_timer_freq_ms": 1000,
    "raylet_check_gc_period_milliseconds": 1000,
    "kill_idle_workers_interval_ms": 1000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
    # Ray's default of 15 puts ranks behind everything else on the machine, its own daemons first. Ranks are what the machine is for.
    "worker_niceness": 0,
}
UNSEEN = {
    # Every process tells each second which calls it ran. Only Ray's dashboard shows them.
    "task_events_report_interval_ms": 0,
}
"""What is not done where Ray's dashboard does not run."""


class HostedNode:
    """One Ray node, whose daemons are children of this process; returns when it has registered with the cluster.

    ``settings`` are Ray's own for a node; without ``gcs_address`` it is the head.
    """

    def __init__(self, settings: dict[str, Any], dashboard: bool) -> None:
        from ray._private import ray_constants
        from ray._private.parameter import RayParams

        if not dashboard:
            _leave_out_dashboard()
        os.environ[setup_worker.RAYS] = rays_setup_worker()
        parameters = RayParams(**settings, setup_worker_path=setup_worker.__file__)
        head = settings.get("gcs_address") is None
        self._node = _node_class(dashboard)(parameters, head=head, shutdown_at_exit=False, spawn_reaper=True)
        self.raylet = self._node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process
        self.address, self.id, self.is_head = self._node.gcs_address, self._node.node_id, head


def rays_setup_worker() -> str:
    """Path of Ray's own script that a raylet starts for each worker."""
    from ray._private import ray_constants, workers

    return str(Path(workers.__file__).parent / ray_constants.SETUP_WORKER_FILENAME)


def _node_class(dashboard: bool) -> Any:
    from ray._private.node import Node

    class Headless(Node):  # type: ignore[misc]
        """A node without Ray's API server and without the part of the agents that serves it: 70 MB and some seconds less."""

        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            self._webui_url = None

    return Node if dashboard else Headless


def _leave_out_dashboard() -> None:
    """Agents start with --minimal, and without parts."""
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
    """``sink`` gets what Ray would print here: ``lines`` with the ``pid`` that they come from, and whether they go without a prefix."""
    import ray

    ray._private.worker.print_to_stdstream = sink


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
