"""Node agents in tests: chaos strikes the processes of their ranks, and nothing else."""

from __future__ import annotations

from pathlib import Path

from actors.node import REPORT_S, NodeAgent
from chaos.processes import LocalProcesses
from fleet.protocol.operations import Operation, perform
from fleet.protocol.ports import MemoryPort


class Untouched:
    """A ``DaemonPort`` and a ``LinkPort`` that refuse whatever is ordered."""

    def operate(self, order: Operation) -> str | None:
        return perform({}, self, order)

    def applied(self, fault: str) -> str:
        return ""

    def close(self) -> None: ...


def agent_of(
    node: str, index: int, folder: Path, coordinator: str, memory: MemoryPort | None = None, report_s: float = REPORT_S
) -> NodeAgent:  # fmt: skip
    """The agent of a node, which has not begun."""
    processes, untouched = LocalProcesses(node), Untouched()
    return NodeAgent(node, index, folder, coordinator, processes, lambda *_: untouched, lambda: untouched, memory, report_s=report_s)
