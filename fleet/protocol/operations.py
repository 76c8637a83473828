"""Operations of faults: the message from the injector to the process that carries a fault out, and the table of such acts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from fleet.protocol.fault_kinds import drawn
from fleet.protocol.types import Fault, Process

START, HEAL = "start", "heal"
ANNOUNCE, WITHDRAW = "announce", "withdraw"
"""Phases before the start, for kinds of which the run gets a notice."""
HEAD = -1
"""Stands for the coordinator's host in the place of a node's index."""
STORE = -2
"""Stands for the store in the place of a node's index. Each node knows the store's address."""
THE_ONE = {HEAD: "the coordinator", STORE: "the store"}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a fault: the message from the injector to the process that carries it out.

    It goes to ``process`` (a kind whose unit is the rank) or to worker node ``node``, by its index. ``fault`` is the fault's id, ``phase``
    one of the constants above. ``seed`` draws the details that the fault leaves open, such as the bit that flips.

    For a fault of links every node gets an operation. ``hosts`` are the addresses from which the node is cut off. ``is_target``: the fault
    names this node. ``loss``, ``delay_s``, ``bytes_per_s`` and ``jitter_s`` are the fault's.
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
"""(kind, phase) -> the function by which a performer carries it out. It returns the reason of a refusal, or None."""


def perform(acts: Acts, performer: object, order: Operation) -> str | None:
    """Carry ``order`` out by its row in ``acts``. Returns the reason of a refusal, or None."""
    act = acts.get((order.kind, order.phase))
    return act(performer, order) if act is not None else f"{order.phase} of {order.kind}: no process does that to {order.place} here"
