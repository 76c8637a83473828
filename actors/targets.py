"""Chaos's reach into a live run: what is done to a process goes through the agent of its node."""

from __future__ import annotations

from typing import Any

import ray

from fleet.protocol.fault_kinds import Operation

ANSWER_S = 10.0


class RemoteProcesses:
    """Implements ``fleet.protocol.ports.ProcessPort`` for every node of the run, by way of the coordinator."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def operate(self, order: Operation) -> str | None:
        try:
            refused, _ = ray.get(self._coordinator.operate.remote(order), timeout=ANSWER_S)
        except (ConnectionError, TimeoutError, ray.exceptions.RayError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else order.kind}"
        return refused or None
