"""An operation of a fault: the one message from the injector to the process that does it, and how that is looked up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from fleet.protocol.fault_kinds import drawn
from fleet.protocol.types import Fault, Process

START, HEAL = "start", "heal"
ANNOUNCE, WITHDRAW = "announce", "withdraw"
"""Before the start, of a kind that the run is told of."""
HEAD = -1
"""Stands for the coordinator's host where nodes have indices."""
STORE = -2
"""Stands for the store there. Where it is, each node knows by itself."""
THE_ONE = {HEAD: "the coordinator", STORE: "the store"}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a fault: the one message from the injector to the process that does it.

    It goes to ``process`` (a kind whose unit is the rank) or to worker node ``node``, by its index. ``fault`` is the fault's id, ``phase``
    is one of those above; ``seed`` draws what the fault leaves open, such as the bit that flips.

    Of a kind that is done to links, every node gets one: ``hosts`` are the addresses that it is cut off from; ``is_target``: this is the
    node that the fault names. ``loss``, ``delay_s``, ``bytes_per_s`` and ``jitter_s`` are the fault's.
    """

    fault: str
    kind: str
    phase: str
    process: Process | None = None
    node: int | None = None
    duration_s: float = 0.0
    severity: float = 1.0
    seed: int = 0
    hosts: tuple[str, ...] = ()
    is_target: bool = False
    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    jitter_s: float = 0.0

    @property
    def place(self) -> str:
        """The target in words, for refusals."""
        if self.process is None and self.node in THE_ONE:
            return THE_ONE[self.node]
        return f"process {self.process.pid} of node {self.process.node}" if self.process is not None else f"node {self.node}"


def operation(fault: Fault, phase: str, *, process: Process | None = None, node: int | None = None) -> Operation:
    """``phase`` of ``fault``, to one target."""
    seed = crc32(fault.id.encode())
    return Operation(
        fault.id, drawn(fault).name, phase, process, node, fault.duration_s, fault.severity, seed,
        loss=fault.loss, delay_s=fault.delay_s, bytes_per_s=fault.bytes_per_s, jitter_s=fault.jitter_s,
    )  # fmt: skip


Acts = Mapping[tuple[str, str], Callable[[Any, Operation], str | None]]
"""(kind, phase) -> how one performer carries it out; each returns why it was refused, or None."""


def perform(acts: Acts, performer: object, order: Operation) -> str | None:
    """Carry ``order`` out as ``acts`` say. Returns why it was refused, or None."""
    act = acts.get((order.kind, order.phase))
    return act(performer, order) if act is not None else f"{order.phase} of {order.kind}: nobody does that to {order.place} here"
