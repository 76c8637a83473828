"""An operator's orders to a run's chaos: given from any thread, carried out by the one that conducts it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from chaos.injector import Injector
from fleet.errors import ConfigError
from fleet.protocol.facts import FaultRecord
from fleet.protocol.fault_kinds import BY_HAND, EXECUTABLE, KINDS
from fleet.protocol.fault_parameters import PARAMETERS
from fleet.protocol.types import Fault

MOST_WAITING = 32


Order = Literal["start", "stop", "heal"] | Fault
"""A fault strikes now: its ``at_s`` is filled in when it is carried out."""


class ChaosControls:
    """Takes orders, and keeps them until the injector's thread asks for them.

    Args:
        slots, nodes: how many there are to be struck.
        planned: whether the run has a plan of faults, so that chaos is on from the start.
    """

    def __init__(self, slots: int, nodes: int, planned: bool) -> None:
        self._slots, self._nodes = slots, nodes
        self._running, self._ended = planned, False
        self._orders: list[Order] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def order(self, asked: Mapping[str, Any]) -> str:
        """What the page's API was asked for, whose description has the fields. Returns what will happen. Raises ConfigError."""
        match asked["action"]:
            case "start":
                return self.start()
            case "stop":
                return self.stop()
            case "heal":
                return self.heal()
            case _:
                amounts = {parameter.name: float(asked[parameter.name]) for parameter in PARAMETERS if parameter.name in asked}
                places = {place: int(asked[place]) for place in ("slot", "node") if place in asked}
                return self.inject(asked.get("kind", ""), amounts=amounts, **places)

    def start(self) -> str:
        """Let planned faults strike. Returns what will happen."""
        self._give("start")
        self._running = True
        return "planned faults strike; when none is left, a storm is planned"

    def stop(self) -> str:
        """Keep planned faults from striking; what has struck heals in its time."""
        self._give("stop")
        self._running = False
        return "no planned fault strikes until chaos is started again"

    def heal(self) -> str:
        """Heal what has struck and lasts, as far as an order can; a lost node comes back where it would."""
        self._give("heal")
        return "what has struck and lasts is healed"

    def inject(self, kind: str, slot: int | None = None, node: int | None = None, amounts: Mapping[str, float] | None = None) -> str:
        """One fault, as soon as may be; returns its id. ``amounts`` are its parameters by their names, where not their defaults.

        Raises ConfigError when it cannot be.
        """
        if kind not in EXECUTABLE:
            raise ConfigError("kind", kind, "is no fault that can be carried out", f"Choose one of {', '.join(EXECUTABLE)}.")
        place = self._checked_place(kind, slot, node)
        given = amounts or {}
        own_bounds = {parameter.name: parameter for parameter in KINDS[kind].parameters}
        for parameter in (own_bounds.get(parameter.name, parameter) for parameter in PARAMETERS):
            if not parameter.holds(value := given.get(parameter.name, parameter.default)):
                raise ConfigError(parameter.name, value, f"{parameter.meaning}: must be {parameter.bounds}")
        name = f"by-hand-{next(self._numbers)}"
        own: dict[str, Any] = {parameter.name: given.get(parameter.name, parameter.default) for parameter in KINDS[kind].parameters}
        self._give(Fault(name, 0.0, BY_HAND, kind, **place, **own))
        return name

    def _checked_place(self, kind: str, slot: int | None, node: int | None) -> dict[str, int]:
        """What a fault of this kind has to name, as fields of ``Fault``. Raises ConfigError."""
        name = place_name(kind)
        if not name:
            return {}
        place, count = (node, self._nodes) if name == "node" else (slot, self._slots)
        if place is None or not 0 <= place < count:
            raise ConfigError(name, place, f"{kind} strikes a {name}, of which there are 0 to {count - 1}")
        return {name: place}

    def _give(self, order: Order) -> None:
        with self._lock:
            if self._ended:
                raise ConfigError("run", "ended", "has no chaos any more")
            if len(self._orders) >= MOST_WAITING:
                raise ConfigError("orders", len(self._orders), "wait to be carried out already", "Wait until the run trains.")
            self._orders.append(order)

    @property
    def waiting(self) -> bool:
        """Whether an order was given that nobody took yet."""
        return bool(self._orders)

    def take(self) -> list[Order]:
        """The orders since the last call, oldest first."""
        with self._lock:
            orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """The run is over: further orders are refused."""
        with self._lock:
            self._ended, self._running = True, False

    def status(self) -> dict[str, Any]:
        """What a page shows: whether chaos strikes, and what may be ordered."""
        places = {kind: place_name(kind) for kind in EXECUTABLE}
        return {"running": self._running, "ended": self._ended, "kinds": list(EXECUTABLE), "places": places, "slots": self._slots,
                "nodes": self._nodes}  # fmt: skip


def place_name(kind: str) -> str:
    """What an order has to name for it: ``"slot"``, ``"node"``, or nothing."""
    return KINDS[kind].targets[0].field


def obey(orders: Iterable[Order], injector: Injector, now_s: float, storm: Callable[[], tuple[Fault, ...]]) -> list[FaultRecord]:
    """Carry orders out: what strikes does so at the injector's next turn. Returns reports of what was planned anew.

    ``storm`` makes the faults that follow when chaos is started and none is left; their times count from ``now_s``.
    """
    planned: list[FaultRecord] = []
    for order in orders:
        match order:
            case "stop":
                injector.pause(True)
            case "start":
                injector.pause(False)
                if injector.next_s() == math.inf:
                    later = [dataclasses.replace(f, id=f"{f.id}-at-{now_s:.0f}", at_s=f.at_s + now_s) for f in storm()]
                    planned += injector.add(later, now_s)
            case "heal":
                injector.heal_all()
            case Fault():
                planned += injector.add([dataclasses.replace(order, at_s=now_s)], now_s)
    return planned
