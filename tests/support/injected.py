"""Faults in tests: a live process of this host as a target, and faults that are carried out at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chaos.injector import FaultAction, Injector
from fleet.host.proc import start_ticks
from fleet.protocol.facts import FaultRecord
from fleet.protocol.operations import Operation
from fleet.protocol.types import Process


def this_process(pid: int, node: str) -> Process:
    """``Process`` of a live pid of this host."""
    return Process(node, pid, start_ticks(pid))


def inject(
    injector: Injector, actions: Iterable[FaultAction], now_s: float, operate: Callable[[Operation], str | None]
) -> list[FaultRecord]:
    """Perform ``actions`` one after the other; the events to send. ``operate`` does one operation, and says why not, if not."""
    return [injector.outcome(action, [operate(order) for order in action.operations], now_s) for action in actions]
