"""The nodes of a plain job on one machine: groups of ranks that are lost together. Also the faults that such a job can have. Pure.

These are the faults that need neither Fleet's agents nor Ray.
"""

from __future__ import annotations

from fleet.protocol.fault_kinds import TABLE, Performer, kind_of


class PlainNodes:
    """``world`` ranks on ``nodes`` nodes. The ranks of a node have neighbouring numbers, as a launcher assigns them."""

    def __init__(self, world: int, nodes: int) -> None:
        self._node = {slot: slot * nodes // world for slot in range(world)}
        self._down: list[int] = []

    def of(self, slot: int) -> int:
        """The node of a rank."""
        return self._node[slot]

    def is_up(self, slot: int) -> bool:
        """Whether the node of a rank is up."""
        return self._node[slot] not in self._down

    def up(self) -> dict[int, tuple[int, ...]]:
        """The nodes that are up, with their ranks."""
        there = dict.fromkeys(node for slot, node in self._node.items() if self.is_up(slot))
        return {node: tuple(slot for slot, at in self._node.items() if at == node) for node in there}

    def lose(self, node: int) -> bool:
        """Take a node away. Gives whether it was up."""
        if node not in self.up():
            return False
        self._down.append(node)
        return True

    def restore(self) -> int:
        """Restore the node that was lost first, and give its number. Raises IndexError when none is lost."""
        return self._down.pop(0)


INJECTABLE = tuple(kind.name for kind in TABLE if kind.performer in (Performer.AGENT, Performer.LAUNCHER) and not kind.whole_rack)
"""Faults that are signals to processes of this machine."""


def why_not(kind: str) -> str:
    """The reason that a fault of another kind cannot be injected."""
    performer = kind_of(kind).performer
    needed = f"{kind} is done by {performer}" if performer is not None else f"{kind} has no operation"
    return f"{needed}, and a job that is not Fleet's has none. It can have the faults {', '.join(INJECTABLE)}"
