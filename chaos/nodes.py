"""Whole nodes, which the launcher loses and brings back."""

from __future__ import annotations

from typing import Protocol

from fleet.protocol.operations import ANNOUNCE, HEAL, START, WITHDRAW, Acts, Operation, perform
from fleet.protocol.ports import NodePort


class RunNodes(NodePort, Protocol):
    """The nodes of a run, which take a notice that one of them will be taken away."""

    def announce(self, index: int, notice_s: float | None) -> str | None:
        """Node ``index`` goes in ``notice_s``; None: it stays after all. Returns the reason why no process got the notice, or None."""
        ...


class ClusterNodes:
    """Carries out faults of a cluster's nodes."""

    def __init__(self, cluster: RunNodes) -> None:
        self._cluster = cluster

    def operate(self, order: Operation) -> str | None:
        """Carry out the order, by ``ACTS``. Returns the reason of a refusal, or None."""
        return perform(ACTS, self._cluster, order)


def _restore(cluster: RunNodes, order: Operation) -> None:
    """Bring it back as a new node, whose index the launcher chooses."""
    cluster.add()


def _lose(cluster: RunNodes, order: Operation) -> str | None:
    return cluster.lose(order.node) if order.node is not None else "no node is named"


def _announce(cluster: RunNodes, order: Operation) -> str | None:
    return cluster.announce(order.node, order.duration_s) if order.node is not None else "no node is named"


def _withdraw(cluster: RunNodes, order: Operation) -> str | None:
    return cluster.announce(order.node, None) if order.node is not None else "no node is named"


ACTS: Acts = {
    ("lose_node", START): _lose,
    ("lose_node", HEAL): _restore,
    ("maintenance", ANNOUNCE): _announce,
    ("maintenance", WITHDRAW): _withdraw,
    ("maintenance", START): _lose,
    ("maintenance", HEAL): _restore,
    ("rack", START): _lose,
    ("rack", HEAL): _restore,
}
"""The launcher performs these."""
