"""Nodes of a job that runs on one machine, groups of ranks that are lost together, and which faults may strike it. Pure.

Those that need neither Fleet's agents nor Ray.
"""

from __future__ import annotations

from fleet.protocol.fault_kinds import TABLE, Performer, kind_of


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


INJECTABLE = tuple(kind.name for kind in TABLE if kind.performer in (Performer.AGENT, Performer.LAUNCHER) and not kind.whole_rack)
"""Signals to processes of this machine."""


def why_not(kind: str) -> str:
    """Why a fault of another kind does not strike."""
    performer = kind_of(kind).performer
    needed = f"{kind} is done by {performer}" if performer is not None else f"{kind} has no operation"
    return f"{needed}, and a job that is not Fleet's has none: what can strike it is {', '.join(INJECTABLE)}"
