"""The loop that carries chaos out on a live run: what is planned, and what an operator orders beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from chaos.conductor import Action, ChaosView, Conductor
from chaos.controls import ChaosControls, obey
from fleet.cluster.clock import Clock
from fleet.protocol.events import FaultReported
from fleet.protocol.fault_kinds import Operation
from fleet.protocol.types import Fault

POLL_S = 0.05
ORDER_POLL_S = 0.5

Pause = Callable[[float], bool]
"""Waits so many seconds, or until the run is over: then it says True."""


class ChaosWorld(Protocol):
    """A run as chaos sees it, and reaches into it."""

    def see(self) -> ChaosView: ...

    def operate(self, order: Operation) -> str | None:
        """Have it carried out. Returns why it was refused, or None."""
        ...

    def report(self, event: FaultReported) -> None:
        """Tell the run's coordinator. Its time is that of the clock that the loop was given."""
        ...


class LiveChaos:
    """Strikes ``world`` as ``conductor`` and ``controls`` say; ``storm`` makes the faults that follow when chaos is started without any."""

    def __init__(self, conductor: Conductor, controls: ChaosControls, world: ChaosWorld, storm: Callable[[], tuple[Fault, ...]]) -> None:
        self._conductor, self._controls, self._world, self._storm = conductor, controls, world, storm
        self._origin_s = 0.0

    def run(self, clock: Clock, pause: Pause) -> None:
        """Until the run is over. The plan's time counts from when the run first trains."""
        planned = self._conductor.planned(0.0)
        if not (planned or self._ordered(pause)) or not self._trains(pause):
            return
        self._origin_s = clock.now_s()
        for event in planned:
            self._report(event)
        while not pause(POLL_S):
            now_s = clock.now_s() - self._origin_s
            for event in obey(self._controls.take(), self._conductor, now_s, self._storm):
                self._report(event)
            if now_s >= self._conductor.next_s():
                self._carry_out(self._conductor.due(now_s, self._world.see()), clock)
        self._carry_out(self._conductor.end(clock.now_s() - self._origin_s, self._world.see()), clock)

    def _ordered(self, pause: Pause) -> bool:
        """Without a plan, whether an operator orders something before the run ends."""
        while not pause(ORDER_POLL_S):
            if self._controls.waiting:
                return True
        return False

    def _trains(self, pause: Pause) -> bool:
        while not pause(POLL_S):
            if self._world.see().running:
                return True
        return False

    def _carry_out(self, actions: list[Action], clock: Clock) -> None:
        """A fault is announced before the blow, so that a death that follows at once is known to be injected."""
        for action in actions:
            if action.operations:
                self._report(dataclasses.replace(action.report, phase="aimed"))
            refusals = [self._world.operate(order) for order in action.operations]
            self._report(self._conductor.outcome(action, refusals, clock.now_s() - self._origin_s))

    def _report(self, event: FaultReported) -> None:
        self._world.report(dataclasses.replace(event, at_s=event.at_s + self._origin_s))
