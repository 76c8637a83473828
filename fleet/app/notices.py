"""Ray's notices of nodes that will be taken away: from a cloud, an autoscaler or ``ray drain-node``. The run hears of new ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

UNSAID_S = 30.0
"""Seconds for a node whose notice has no time."""
SAID_BY_RAY = "Ray drains it"


@dataclass(slots=True)
class Notices:
    """The notices that the run has heard of so far. Pure."""

    reported: dict[str, float] = field(default_factory=dict)

    def news(self, draining: Mapping[str, float], known: Iterable[str], now_s: float) -> list[tuple[str, float | None]]:
        """(node, seconds until it goes) of each new notice; None for a node that stays after all.

        Args:
            draining: node -> when it goes; 0: not known.
            known: nodes of the run.
            now_s: Unix time, as in ``draining``.
        """
        nodes = set(known)
        fresh = {node: at_s for node, at_s in draining.items() if node in nodes and self.reported.get(node) != at_s}
        stays = [node for node in self.reported if node not in draining]
        self.reported |= fresh
        for node in stays:
            del self.reported[node]
        leaves = [(node, max(0.0, at_s - now_s) if at_s else UNSAID_S) for node, at_s in fresh.items()]
        return [*leaves, *((node, None) for node in stays if node in nodes)]
