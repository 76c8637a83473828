"""Injects faults into processes of a live run, through the agents of their nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray

from actors.messages import Operated
from fleet.protocol.operations import HEAL, START, Operation

ANSWER_S = 10.0


class RemoteProcesses:
    """Implements ``fleet.protocol.ports.ProcessPort`` for all nodes of the run, through the coordinator."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.said: dict[str, list[str]] = {}
        """By fault, the reports of the agents on the fault that they applied."""

    def operate(self, order: Operation) -> str | None:
        try:
            answer: Operated = ray.get(self._coordinator.operate.remote(order), timeout=ANSWER_S)
        except (ConnectionError, TimeoutError, ray.exceptions.RayError) as error:
            if order.phase == START:  # it may still be carried out, and then has to be healed
                self._coordinator.operate.remote(replace(order, phase=HEAL))
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else order.kind}"
        if answer.said:
            self.said.setdefault(order.fault, []).append(f"{order.place}: {answer.said}")
        return answer.refused or None
