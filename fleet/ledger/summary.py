"""What the ledger says at one moment: immutable, safe to hand to another thread. Made by ``fleet.ledger.goodput``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.ledger.expectation import Expectation
    from fleet.ledger.samples import Samples

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
        down_s: of an outage: how long the run was stopped and nobody held a machine. In no category, and no part of any cost.
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
    down_s: float = 0.0

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

    ``categories`` and ``pending_s`` together are ``rank_s``: ``slots x held``. ``down_s`` is how long the run was stopped and nobody held a
    machine: it is in no rank-second, and ``held_s`` is the rest of the wall time. ``pending_s`` is what is not decided yet (steps in
    flight, time not yet reported) and is 0 once the run has ended; goodput, ETTR and the like are of what is decided.
    ``training_goodput`` is that of the ``training_s`` seconds in which the run trained, as ``fleet.ledger.stretches`` has it: what
    ``expectation`` is said of. ``cold_provision_s`` is the part of provision in which slots waited for the first process since the run
    started or was resumed.

    ``settled`` never falls, nor does ``reclassified``: what was committed and later rolled back
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
    held_s: float
    down_s: float
    training_s: float
    world: int
    spares: int
    shards: int
    categories: Mapping[str, float]
    slot_us: tuple[tuple[int, ...], ...]
    pending_s: float
    cold_provision_s: float
    settled: Mapping[str, float]
    reclassified: Mapping[str, float]
    holes: int
    hole_s: float
    stale_s: float
    closes: bool
    goodput: float
    scheduling_goodput: float
    training_goodput: float
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
    expectation: Expectation | None = None
    queued_s: float = 0.0
    samples: Samples | None = None

    @property
    def goodput_drift(self) -> float | None:
        """Measured less expected, while training; None where it is not known."""
        return None if self.expectation is None else self.training_goodput - self.expectation.goodput

    @property
    def slots(self) -> tuple[Mapping[str, float], ...]:
        """Seconds by category, of each slot; made when asked for."""
        return tuple({name: us / 1e6 for name, us in zip(self.categories, row, strict=True)} for row in self.slot_us)

    @property
    def wall_s(self) -> float:
        """The calendar's duration, stops and resumes included."""
        return self.now_s - self.started_s

    def unix_s(self, at_s: float) -> float:
        """The calendar's time of a moment on the run's clock."""
        return self.started_unix_s + at_s - self.started_s

    @property
    def rank_s(self) -> float:
        """Allocated rank-seconds: ``(world + spares) x held``."""
        return (self.world + self.spares) * self.held_s

    @property
    def decided_s(self) -> float:
        """Allocated rank-seconds of which it is known where they went."""
        return self.rank_s - self.pending_s
