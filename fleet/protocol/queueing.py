"""Input and output of a queue of runs, as data alone. ``policies.admission`` decides, and ``fleet.app.cluster.queue`` acts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.errors import ConfigError

PRIORITIES = range(-100, 101)
"""The priorities that a run may have; the greatest starts first."""
TOP = PRIORITIES[-1] + 1
"""Above every priority: a run that waits long enough gets it."""
SLOT = "slot"
ONE_SLOT: Mapping[str, float] = {SLOT: 1.0}
OTHERS = "*"
"""Stands for each team without its own quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run's request: ``slots`` times ``shape``, all of them or nothing.

    Args:
        shape: the resources of a node that one slot takes, by name.
        selector: conditions on labels of nodes that the run may use; see ``fleet.settings.per_rank``.
        priority: the greatest starts first.
        since_s: when the run was handed in; a run that gives way keeps it.
        waited_s: the run's total waiting time; it does not grow while the run runs.
        team: the team whose quota the run counts for; empty: no team's.
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
    """A run that has its slots. ``placed``: their number by node name. ``leaving``: the run was told to give way, and has not ended."""

    asked: Asked
    placed: Mapping[str, int]
    began_s: float = 0.0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A node with the resources for the queue's runs. They include those of its present runs, and leave out those of other users."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a queue. By default, runs start by priority, then by age, and no run is stopped.

    Args:
        quotas: the slots that each team may have at once; ``*``: each team that is not named. Without a quota the cluster is the limit.
        preempts: runs of lower priority give way to a run that has no room.
        ageing_s: a run that has waited so long counts as one priority higher, up to above all of them; 0: never.
    """

    quotas: Mapping[str, int] = field(default_factory=dict)
    preempts: bool = False
    ageing_s: float = 0.0

    def __post_init__(self) -> None:
        for team, slots in self.quotas.items():
            if slots < 1:
                raise ConfigError("--quota", f"{team}={slots}", "no run could ever start: each has a rank", "Give at least 1.")
        if not 0.0 <= self.ageing_s < math.inf:
            raise ConfigError("--ageing", self.ageing_s, "must be a time from 0 s on", "Write e.g. 15m; 0: no run rises by waiting.")

    def quota(self, team: str) -> float:
        """The slots that ``team`` may have at once; infinite where no quota is set."""
        return self.quotas.get(team, self.quotas.get(OTHERS, math.inf)) if team else math.inf


@dataclass(frozen=True, slots=True)
class Start:
    """Start or continue run ``name``. ``placed``: the number of its slots on each node."""

    name: str
    placed: Mapping[str, int]
    why: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Run ``name`` has to save its state and end, so that run ``to`` can start."""

    name: str
    to: str
    why: str


Decision = Start | Preempt
