"""Whole nodes, which the launcher loses and brings back."""

from __future__ import annotations

from fleet.protocol.operations import HEAL, START, Acts, Operation, perform
from fleet.protocol.ports import NodePort


class ClusterNodes:
    """Carries out what is done to the nodes of a cluster."""

    def __init__(self, cluster: NodePort) -> None:
        self._cluster = cluster

    def operate(self, order: Operation) -> str | None:
        """Carry it out, as ``ACTS`` says. Returns why it was refused, or None."""
        return perform(ACTS, self._cluster, order)


def _bring_back(cluster: NodePort, order: Operation) -> None:
    """As a new node, whose index the launcher chooses."""
    cluster.add()


def _lose(cluster: NodePort, order: Operation) -> str | None:
    return cluster.lose(order.node) if order.node is not None else "no node is named"


ACTS: Acts = {
    ("lose_node", START): _lose,
    ("lose_node", HEAL): _bring_back,
    ("rack", START): _lose,
    ("rack", HEAL): _bring_back,
}
"""What the launcher does."""
