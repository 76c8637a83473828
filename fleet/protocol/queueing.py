"""What a queue of runs decides on, and what it decides: data alone. ``policies.admission`` decides, ``fleet.app.cluster.queue`` does it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.errors import ConfigError

PRIORITIES = range(-100, 101)
"""Those that a run may be handed in with; the greatest starts first."""
TOP = PRIORITIES[-1] + 1
"""Where waiting leads in the end: above every priority."""
SLOT = "slot"
ONE_SLOT: Mapping[str, float] = {SLOT: 1.0}
OTHERS = "*"
"""The quota of each team that has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run asks for: ``slots`` times ``shape``, all of them or nothing.

    Args:
        shape: what one slot takes of a node, by the resource's name.
        selector: conditions on labels of the nodes that it may be on; see ``fleet.settings.per_rank``.
        priority: the greatest starts first.
        since_s: when it was handed in; it keeps that when it gives way.
        waited_s: how long it has waited in all; while it runs it does not grow.
        team: whose quota it counts for; empty: nobody's.
    """

    name: str
    slots: int
    priority: int = 0
    since_s: float = 0.0
    waited_s: float = 0.0
    team: str = ""
    shape: Mapping[str, float] = field(default_factory=lambda: ONE_SLOT)
    selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A run that has its slots: so many on each node, by the node's name. ``leaving``: it was told to give way, and has not ended yet."""

    asked: Asked
    placed: Mapping[str, int]
    began_s: float = 0.0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A node, and what of it the queue may give to its runs: what those have now included, what anybody else holds left out."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a queue decides. As they stand: by priority, then by age, and nothing that runs is stopped.

    Args:
        quotas: the slots that each team may have at once; ``*``: each team that is not named. Others have no limit but the cluster.
        preempts: runs of lower priority give way to what has no room.
        ageing_s: whoever has waited so long counts as one priority higher, up to above them all; 0: never.
    """

    quotas: Mapping[str, int] = field(default_factory=dict)
    preempts: bool = False
    ageing_s: float = 0.0

    def __post_init__(self) -> None:
        for team, slots in self.quotas.items():
            if slots < 1:
                raise ConfigError("--quota", f"{team}={slots}", "no run could ever start: each has a rank", "Give at least 1.")
        if not 0.0 <= self.ageing_s < math.inf:
            raise ConfigError("--ageing", self.ageing_s, "must be a time from 0 s on", "Write e.g. 15m; 0: nobody rises by waiting.")

    def quota(self, team: str) -> float:
        """The slots that ``team`` may have at once; infinite where nobody has set any."""
        return self.quotas.get(team, self.quotas.get(OTHERS, math.inf)) if team else math.inf


@dataclass(frozen=True, slots=True)
class Start:
    """Start a run, or go on with it, with so many slots on each node."""

    name: str
    placed: Mapping[str, int]
    why: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Run ``name`` is to keep its state and end, so that run ``to`` can start."""

    name: str
    to: str
    why: str


Decision = Start | Preempt
