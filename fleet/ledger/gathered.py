"""Small objects that the fold of the ledger fills on its way."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from fleet.ledger.bill import tariff
from fleet.ledger.costs import Floors
from fleet.ledger.forecast import Terms, numbers
from fleet.ledger.samples import StepCover
from fleet.ledger.slots import NAMES, Abandoned
from fleet.ledger.summary import Rollback
from fleet.protocol.records import CheckpointRecord, DataRead, RunStarted, configuration, section

GAP_SAMPLES = 4_096
NOWHERE = 1 << 62


class RunSaid:
    """The parts of the run's configuration that its sums need."""

    def __init__(self, started: RunStarted) -> None:
        said = configuration(started.config)
        settings = section(said, "settings")
        self.cost = dict(section(settings, "cost"))
        self.queued_s = numbers(said).get("queued_s", 0.0)
        self.kept = int(numbers(section(settings, "checkpoint")).get("keep", 1))
        self.tariff, self.device = tariff(self.cost), str(self.cost.get("device") or "")
        self.budget_usd: float | None = self.cost.get("budget_usd")
        self.fault_rates = _positive(section(said, "fault_rates"))
        self.terms = Terms.said(said, started.world, started.spares)


@dataclass(slots=True)
class StepsTaken:
    """``step`` of ``history`` is committed. ``commits`` and ``rolled_back`` are of all histories.

    The other fields come from the ranks' spans: the number of their steps that count, the time of those, and the gaps between the newest.
    """

    history: int = 0
    step: int = 0
    commits: int = 0
    rolled_back: int = 0
    by_ranks: int = 0
    productive_us: float = 0.0
    gaps_us: deque[int] = field(default_factory=lambda: deque[int](maxlen=GAP_SAMPLES))

    @property
    def median_us(self) -> float:
        """Median of the newest steps; 0 before the second."""
        return statistics.median(self.gaps_us) if self.gaps_us else 0.0


@dataclass(slots=True)
class Undone:
    """Work that does not count, or may not count.

    ``held``: attempts without a verdict yet, by generation. ``views``, ``histories``: the steps up to which they count. ``boundaries``:
    steps that they may go back to. ``owed_us``: rework that waits for a view to name its cause. ``reclassified_us``: all time moved there.
    """

    held: dict[int, list[Abandoned]] = field(default_factory=dict)
    views: Floors = field(default_factory=Floors)
    histories: Floors = field(default_factory=Floors)
    boundaries: list[int] = field(default_factory=list)
    owed_us: int = 0
    reclassified_us: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    rollbacks: list[Rollback] = field(default_factory=list)


@dataclass(slots=True)
class CheckpointsSeen:
    """Number of checkpoints by level and phase, the ``newest`` durable one, and the intervals of either level."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    newest: CheckpointRecord | None = None
    interval_s: float | None = None
    copy_interval_s: float | None = None

    def by_phase(self, level: str) -> dict[str, int]:
        return {phase: count for (of, phase), count in self.counts.items() if of == level}


@dataclass(slots=True)
class SamplesRead:
    """The data sets of steps, the steps that ranks committed, and the histories: (number, the step it went on from)."""

    reads: list[DataRead] = field(default_factory=list)
    cover: StepCover = field(default_factory=StepCover)
    histories: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])


@dataclass(slots=True)
class WorldSize:
    """Ranks that the run should have, and for each change (more ranks, held until then, trained until then), in microseconds."""

    ranks: int = 0
    changes: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class HappeningCounts:
    """Faults by kind and phase; views, and the members of the last one."""

    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    views: int = 0
    members: int = 0


def _positive(said: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in numbers(said).items() if 0 < value < NOWHERE}
