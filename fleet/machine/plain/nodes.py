"""Nodes of a job that runs on one machine: groups of ranks that are lost together. Pure."""

from __future__ import annotations


class PlainNodes:
    """``world`` ranks on ``nodes`` nodes, those of a node next to each other, as a launcher numbers them."""

    def __init__(self, world: int, nodes: int) -> None:
        self._node = {slot: slot * nodes // world for slot in range(world)}
        self._down: list[int] = []

    def of(self, slot: int) -> int:
        """The node of a rank."""
        return self._node[slot]

    def is_up(self, slot: int) -> bool:
        """Whether the node of a rank is there."""
        return self._node[slot] not in self._down

    def up(self) -> dict[int, tuple[int, ...]]:
        """The nodes that are there, with their ranks."""
        there = dict.fromkeys(node for slot, node in self._node.items() if self.is_up(slot))
        return {node: tuple(slot for slot, at in self._node.items() if at == node) for node in there}

    def lose(self, node: int) -> bool:
        """Whether it was there."""
        if node not in self.up():
            return False
        self._down.append(node)
        return True

    def restore(self) -> int:
        """The one that was lost first, which is returned. Raises IndexError when none is lost."""
        return self._down.pop(0)
