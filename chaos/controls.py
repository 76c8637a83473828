"""An operator's orders to a run's chaos. Any thread gives them, and the injector's thread carries them out."""

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
        slots, nodes: the numbers of slots and nodes that faults can strike.
        planned: whether the run has a plan of faults, so that chaos is on from the start.
    """

    def __init__(self, slots: int, nodes: int, planned: bool) -> None:
        self._slots, self._nodes = slots, nodes
        self._running, self._ended = planned, False
        self._orders: list[Order] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def order(self, asked: Mapping[str, Any]) -> str:
        """Take a request of the page's API, whose description has the fields. Returns its effect. Raises ConfigError."""
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
        """Let planned faults strike. Returns the effect, in words."""
        self._give("start")
        self._running = True
        return "planned faults strike; when none is left, a storm is planned"

    def stop(self) -> str:
        """Keep planned faults from striking; faults that last heal in their time."""
        self._give("stop")
        self._running = False
        return "no planned fault strikes until chaos is started again"

    def heal(self) -> str:
        """Heal faults that last, as far as an order can; a lost node comes back at its own time."""
        self._give("heal")
        return "the faults that last are healed"

    def inject(self, kind: str, slot: int | None = None, node: int | None = None, amounts: Mapping[str, float] | None = None) -> str:
        """Inject one fault as soon as possible; returns its id. ``amounts`` are its parameters by name, where they differ from the
        defaults.

        Raises ConfigError when it is not possible.
        """
        if kind not in EXECUTABLE:
            raise ConfigError("kind", kind, "is no fault that chaos can carry out", f"Choose one of {', '.join(EXECUTABLE)}.")
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
        """The place of a fault of this kind, as fields of ``Fault``. Raises ConfigError."""
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
        """Whether there is an order that the injector has not taken yet."""
        return bool(self._orders)

    def take(self) -> list[Order]:
        """The orders since the last call, oldest first."""
        with self._lock:
            orders, self._orders = self._orders, []
        return orders

    def close(self) -> None:
        """The run is over: refuse further orders."""
        with self._lock:
            self._ended, self._running = True, False

    def status(self) -> dict[str, Any]:
        """For a page: whether chaos strikes, and which orders it takes."""
        places = {kind: place_name(kind) for kind in EXECUTABLE}
        return {"running": self._running, "ended": self._ended, "kinds": list(EXECUTABLE), "places": places, "slots": self._slots,
                "nodes": self._nodes}  # fmt: skip


def place_name(kind: str) -> str:
    """The place that an order has to name for it: ``"slot"``, ``"node"``, or none."""
    return KINDS[kind].targets[0].field


def obey(orders: Iterable[Order], injector: Injector, now_s: float, storm: Callable[[], tuple[Fault, ...]]) -> list[FaultRecord]:
    """Carry orders out; their faults strike at the injector's next turn. Returns reports of newly planned faults.

    ``storm`` makes faults for when chaos is started and none is left; their times count from ``now_s``.
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
