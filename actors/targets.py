"""Chaos's reach into a live run: what is done to a process goes through the agent of its node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray

from actors.messages import Operated
from fleet.protocol.operations import HEAL, START, Operation

ANSWER_S = 10.0


class RemoteProcesses:
    """Implements ``fleet.protocol.ports.ProcessPort`` for every node of the run, by way of the coordinator."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.said: dict[str, list[str]] = {}
        """What was applied, by faults, in the words of those who measured it."""

    def operate(self, order: Operation) -> str | None:
        try:
            answer: Operated = ray.get(self._coordinator.operate.remote(order), timeout=ANSWER_S)
        except (ConnectionError, TimeoutError, ray.exceptions.RayError) as error:
            if order.phase == START:  # it may yet be carried out, and nobody would heal it
                self._coordinator.operate.remote(replace(order, phase=HEAL))
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else order.kind}"
        if answer.said:
            self.said.setdefault(order.fault, []).append(f"{order.place}: {answer.said}")
        return answer.refused or None
