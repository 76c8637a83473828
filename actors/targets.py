"""Chaos's reach into a live run: signals go through the agent of the node that the process lives on."""

from __future__ import annotations

from typing import Any

import ray

from fleet.types import Process

ANSWER_S = 10.0


class RemoteProcesses:
    """Implements ``fleet.ports.ProcessPort`` for every node of the run, by way of the coordinator."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def kill(self, process: Process) -> str | None:
        return self._operate("kill", process)

    def stop(self, process: Process) -> str | None:
        return self._operate("stop", process)

    def resume(self, process: Process) -> str | None:
        return self._operate("resume", process)

    def slow(self, process: Process, severity: float, duration_s: float) -> str | None:
        return self._operate("slow", process, severity, duration_s)

    def spoil(self, process: Process, what: str, seed: int, duration_s: float) -> str | None:
        return self._operate(what, process, 1.0, duration_s, seed)

    def _operate(self, operation: str, process: Process, severity: float = 1.0, duration_s: float = 0.0, seed: int = 0) -> str | None:
        try:
            refused, _ = ray.get(self._coordinator.operate.remote(operation, process, severity, duration_s, seed), timeout=ANSWER_S)
        except (ConnectionError, TimeoutError, ray.exceptions.RayError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else operation}"
        return refused or None
