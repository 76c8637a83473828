"""The loop that carries out chaos on a live run: planned faults, and an operator's orders beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from chaos.controls import ChaosControls, obey
from chaos.injector import ChaosView, FaultAction, Injector
from chaos.radius import limits_of
from chaos.settings import ChaosSettings, parse_chaos
from fleet.host.clock import Clock
from fleet.ledger.pace import Floor
from fleet.protocol.events import FloorReached
from fleet.protocol.facts import FaultRecord
from fleet.protocol.operations import Operation
from fleet.protocol.types import Fault
from fleet.settings.run import RunSettings

POLL_S = 0.05
ORDER_POLL_S = 0.5
LOOK_S = 1.0

Pause = Callable[[float], bool]
"""Waits so many seconds, or until the run is over: then it returns True."""


class ChaosWorld(Protocol):
    """A run, as chaos sees and strikes it."""

    def see(self) -> ChaosView: ...

    def operate(self, order: Operation) -> str | None:
        """Have the order carried out. Returns the reason of a refusal, or None."""
        ...

    def report(self, event: FaultRecord) -> None:
        """Tell the run's coordinator. The event's time is on the loop's clock."""
        ...

    def learned(self, fault: str) -> str:
        """The measured effect of a fault, in the words of its performers; empty without a measurement."""
        ...

    def committed_step(self) -> int | None:
        """The newest committed step; None once all are committed."""
        ...

    def report_floor(self, event: FloorReached) -> None:
        """Tell the run's coordinator that chaos stops."""
        ...


class LiveChaos:
    """Strikes ``world`` as ``injector`` and ``controls`` decide. ``storm`` makes faults for when chaos is started without any.

    ``floor``: when less is left of the run's pace, all faults are healed, and the run goes on without any. ``at_steps``: faults that strike
    once a step is committed, by step, so that they do not depend on the machine's speed.
    """

    def __init__(
        self, injector: Injector, controls: ChaosControls, world: ChaosWorld, storm: Callable[[], tuple[Fault, ...]],
        floor: Floor | None = None, at_steps: Iterable[tuple[int, Fault]] = (),
    ) -> None:  # fmt: skip
        self._at_steps = deque(at_steps)
        self._injector, self._controls, self._world, self._storm = injector, controls, world, storm
        self._floor, self._looked_s = floor, 0.0
        self._origin_s = 0.0

    def run(self, clock: Clock, pause: Pause) -> None:
        """Runs until the run is over. The plan's time begins when the run first trains."""
        planned = self._injector.planned(0.0)
        if not (planned or self._at_steps or self._ordered(pause)) or not self._trains(pause):
            return
        self._origin_s = clock.now_s()
        for event in planned:
            self._report(event)
        while not pause(POLL_S):
            now_s = clock.now_s() - self._origin_s
            for event in obey(self._controls.take(), self._injector, now_s, self._storm):
                self._report(event)
            self._mind_the_floor(now_s, clock)
            self._mind_the_steps(now_s)
            if now_s >= self._injector.next_s():
                self._carry_out(self._injector.due(now_s, self._world.see()), clock)
        self._plan([fault for _, fault in self._at_steps], clock.now_s() - self._origin_s)  # so that they are on record
        self._carry_out(self._injector.end(clock.now_s() - self._origin_s, self._world.see()), clock)

    def _mind_the_steps(self, now_s: float) -> None:
        """Plan for now the faults whose step is committed."""
        if not self._at_steps or (step := self._world.committed_step()) is None:
            return
        due = []
        while self._at_steps and self._at_steps[0][0] <= step:
            due.append(self._at_steps.popleft()[1])
        self._plan(due, now_s)

    def _plan(self, faults: Iterable[Fault], now_s: float) -> None:
        for event in self._injector.add([dataclasses.replace(fault, at_s=now_s) for fault in faults], now_s):
            self._report(event)

    def _mind_the_floor(self, now_s: float, clock: Clock) -> None:
        """Once a second: is enough left of the pace? If not, heal all faults for good."""
        if self._floor is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        step = self._world.committed_step()
        if step is None:
            self._floor = None
            return
        self._floor.see(now_s, step)
        if self._floor.broken(now_s):
            broken, self._floor = self._floor, None
            self._world.report_floor(FloorReached(broken.kept(now_s) or 0.0, broken.share))
            self._carry_out(self._injector.call_off(now_s, self._world.see(), "too little was left of the run's pace"), clock)

    def _ordered(self, pause: Pause) -> bool:
        """Without a plan: whether an operator gives an order before the run ends."""
        while not pause(ORDER_POLL_S):
            if self._controls.waiting:
                return True
        return False

    def _trains(self, pause: Pause) -> bool:
        while not pause(POLL_S):
            if self._world.see().running:
                return True
        return False

    def _carry_out(self, actions: list[FaultAction], clock: Clock) -> None:
        """Announce a fault before the blow, so that a death right after it is known as injected."""
        for action in actions:
            if action.operations:
                self._report(dataclasses.replace(action.report, phase="aimed"))
            refusals = [self._world.operate(order) for order in action.operations]
            outcome = self._injector.outcome(action, refusals, clock.now_s() - self._origin_s)
            if learned := self._world.learned(outcome.fault.id):
                outcome = dataclasses.replace(outcome, detail=f"{outcome.detail}; {learned}".lstrip("; "))
            if self._floor is not None and outcome.phase == "executed":
                self._floor.injected()
            self._report(outcome)

    def _report(self, event: FaultRecord) -> None:
        self._world.report(dataclasses.replace(event, at_s=event.at_s + self._origin_s))


def live_chaos(settings: RunSettings, chaos: ChaosSettings, controls: ChaosControls, world: ChaosWorld) -> LiveChaos:
    """The planned chaos of a run with these settings. When no fault is left in the plan, an operator's start makes a storm."""
    plan = functools.partial(ChaosSettings.plan, seed=settings.seed, world=settings.slots, nodes=settings.nodes)
    sharded = settings.optimizer_sharding != "none"
    injector = Injector(
        plan(chaos), min_ranks=settings.min_ranks, repair_s=chaos.repair_s, lose_all=chaos.lose_all, sharded=sharded,
        limits=limits_of(chaos.limits or ()), at=chaos.aim,
    )  # fmt: skip
    floor = Floor(chaos.floor, chaos.floor_window_s) if chaos.floor is not None else None
    at_steps = chaos.at_steps(seed=settings.seed, world=settings.slots, nodes=settings.nodes)
    return LiveChaos(injector, controls, world, lambda: plan(parse_chaos("storm")), floor, at_steps)
