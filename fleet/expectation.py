"""What a run should keep of its rank-seconds, said before it starts, from the faults that are planned for it.

First order in faults that do not overlap; what one costs is what it costs on a local cluster. A run that falls far below has a cause that
is not in here: ``fleet diagnose`` looks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleet.config import RunSettings
from fleet.types import Fault

STALL_S = 0.25
"""Survivors are training again that long after a loss."""
REFILL_S = 6.0
"""A lost rank's process is replaced in about that long, on a local cluster."""
RESTART_S = 10.0
"""All ranks are training again that long after a restart, work that is done again not counted."""


def expected_goodput(faults: Sequence[Fault], settings: RunSettings, duration_s: float, repair_s: float | None) -> float:
    """Share of the world's rank-seconds, start-up and end not counted, that becomes committed steps while the faults come.

    1 - sum of costs / (world x duration), at least 0. ``repair_s``: a lost node comes back after that long; None: never.
    """
    lost = sum(_cost(fault, settings, duration_s, math.inf if repair_s is None else repair_s) for fault in faults)
    return max(0.0, 1.0 - lost / (settings.world * duration_s))


def _cost(fault: Fault, settings: RunSettings, duration_s: float, repair_s: float) -> float:
    """Rank-seconds."""
    world, left_s = settings.world, max(0.0, duration_s - fault.at_s)
    if fault.kind == "slow":
        return world * min(fault.duration_s, left_s) * (1.0 - 1.0 / fault.severity)
    if fault.kind not in ("kill_rank", "lose_node", "hang"):
        return 0.0  # suppressed: it has no operation
    ranks = math.ceil(world / settings.nodes) if fault.kind == "lose_node" else 1
    noticed_s = min(fault.duration_s, settings.timeouts.progress_s) if fault.kind == "hang" else 0.0
    if settings.recovery == "restart":
        return world * min(noticed_s + RESTART_S, left_s)
    empty_s = max(REFILL_S, repair_s) if fault.kind == "lose_node" else REFILL_S if fault.kind == "kill_rank" else 0.0
    return world * min(noticed_s + STALL_S, left_s) + max(0, ranks - settings.spares) * min(empty_s, left_s)
