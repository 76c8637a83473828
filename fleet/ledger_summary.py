"""What the ledger says at one moment: immutable, safe to hand to another thread. Made by ``fleet.goodput``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.ledger_samples import Samples

COST_NAMES = ("detect", "reform", "provision", "restore", "rework")
"""Categories that make up the cost of a fault. The ``init`` of replacements is shown beside it."""
STEP_NAMES = ("compute", "exposed_comm", "straggler_wait", "data_wait")


@dataclass(frozen=True, slots=True)
class Incident:
    """A fault, or a loss that no fault explains, and its cost in rank-seconds.

    Args:
        id: the fault's id; ``loss-SLOT.INCARNATION`` or ``outage-N`` when no injected fault explains it.
        phases: (phase, at_s, detail) of an injected fault, in order.
        members: the processes that were lost to it.
        cost: rank-seconds by category, of ``COST_NAMES``.
        init_s: rank-seconds that its replacements took to start up; not part of the cost.
        stall_s: longest gap between two commits that it caused, less a median step; None when no commit followed.
        excess_s: wall time it cost in all, until 20 steps after the world was full again; None when it did not come to that. Losses whose
            times overlap each count the whole overlap.
    """

    id: str
    at_s: float
    component: str
    kind: str
    slot: int | None
    node: int | None
    phases: tuple[tuple[str, float, str], ...]
    members: tuple[str, ...]
    causes: tuple[str, ...]
    cost: Mapping[str, float]
    init_s: float
    stall_s: float | None
    excess_s: float | None

    @property
    def cost_s(self) -> float:
        return sum(self.cost.values())


@dataclass(frozen=True, slots=True)
class LawTerms:
    """Means per rank and committed step, in seconds: where a step's time goes."""

    compute_s: float
    comm_s: float
    sync_s: float
    data_s: float


@dataclass(frozen=True, slots=True)
class Tallies:
    """What is counted beside time. Times are on the run's clock, None before the first. ``decisions`` are by (policy, action).

    ``standing_by`` are live processes in no view; ``worst_slot_losses`` is how often the slot that lost most lost its process.
    """

    last_commit_s: float | None
    last_durable_s: float | None
    checkpoint_bytes: int
    standing_by: int
    worst_slot_losses: int
    ranks_by_node: Mapping[str, int]
    decisions: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """The ledger at ``now_s``. Rank-seconds unless named otherwise.

    ``categories`` and ``pending_s`` together are ``slots x wall``; ``pending_s`` is what is not decided yet (steps in flight, time not yet
    reported) and is 0 once the run has ended. ``settled`` never falls, nor does ``reclassified``: what was committed and later rolled back
    is in ``settled`` under both its first category and ``rework``, and in ``reclassified`` under its first. ``stale_s`` came from processes
    that had been replaced, and is in no category.
    """

    run: str
    status: str
    reason: str
    digest: str
    started_s: float
    started_unix_s: float
    now_s: float
    world: int
    spares: int
    shards: int
    categories: Mapping[str, float]
    slot_us: tuple[tuple[int, ...], ...]
    pending_s: float
    settled: Mapping[str, float]
    reclassified: Mapping[str, float]
    holes: int
    hole_s: float
    stale_s: float
    closes: bool
    goodput: float
    scheduling_goodput: float
    ettr: float
    other_ratio: float
    steps: int
    lineage: int
    commits_total: int
    rolled_back_total: int
    median_step_s: float
    law: LawTerms
    generation: int
    view_size: int
    views_total: int
    losses_total: int
    in_view_losses: int
    faults_by_kind_phase: Mapping[tuple[str, str], int]
    incidents: tuple[Incident, ...]
    uncharged: Mapping[str, float]
    checkpoints_by_phase: Mapping[str, int]
    checkpoint_step: int
    checkpoint_interval_s: float | None
    copies_by_phase: Mapping[str, int]
    copy_interval_s: float | None
    checkpoint_blocked_s: float
    checkpoint_latency_s: float
    measurements: Mapping[str, tuple[int, float]]
    tallies: Tallies
    expected_goodput: float | None = None
    queued_s: float = 0.0
    samples: Samples | None = None

    @property
    def training_goodput(self) -> float:
        """Goodput of the world's slots with start-up, end and waiting spares left out: what ``expected_goodput`` is said of."""
        again = sum(incident.init_s for incident in self.incidents)
        begun = max(0.0, self.categories["init"] - again) + self.categories["finish"] + self.categories["idle_spare"]
        trained = self.rank_s - begun
        return sum(self.categories[name] for name in STEP_NAMES) / trained if trained > 0 else 0.0

    @property
    def goodput_drift(self) -> float | None:
        """Measured less expected; None where nothing was expected."""
        return None if self.expected_goodput is None else self.training_goodput - self.expected_goodput

    @property
    def slots(self) -> tuple[Mapping[str, float], ...]:
        """Seconds by category, of each slot; made when asked for."""
        return tuple({name: us / 1e6 for name, us in zip(self.categories, row, strict=True)} for row in self.slot_us)

    @property
    def wall_s(self) -> float:
        return self.now_s - self.started_s

    def unix_s(self, at_s: float) -> float:
        """The calendar's time of a moment on the run's clock."""
        return self.started_unix_s + at_s - self.started_s

    @property
    def rank_s(self) -> float:
        """Allocated rank-seconds: ``(world + spares) x wall``."""
        return (self.world + self.spares) * self.wall_s
