"""The ledger's figures at one moment: immutable, safe to hand to another thread. Made by ``fleet.ledger.goodput``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fleet.ledger.bill import Tariff, bill, tariff
from fleet.ledger.factors import Factors, factors
from fleet.ledger.step_law import STEP_NAMES, StepLaw, run_shares, step_law
from fleet.ledger.verdicts import Score
from fleet.protocol.records import TOKENS

if TYPE_CHECKING:
    from fleet.ledger.forecast import Terms
    from fleet.ledger.rates import Met
    from fleet.ledger.samples import SampleCount

T = TypeVar("T")

COST_NAMES = ("detect", "reform", "provision", "maintenance", "group_wait", "restore", "rework")
"""Categories that make up the cost of a fault. The ``init`` of replacements stands beside it."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A fault, or a loss that no fault explains, and its cost in rank-seconds.

    Args:
        id: the fault's id; ``loss-SLOT.INCARNATION`` or ``outage-N`` when no injected fault explains it.
        phases: (phase, at_s, detail) of an injected fault, in order.
        members: the processes lost through it.
        cost: rank-seconds by category, of ``COST_NAMES``.
        init_s: rank-seconds of its replacements' start-up; not part of the cost.
        stall_s: longest gap between two commits that it caused, less a median step; None when no commit followed.
        excess_s: wall time that it cost in all, until 20 steps after the world was full again; None when the run did not get so far. Losses
            whose times overlap each count the whole overlap.
        down_s: of an outage: how long the run was stopped and held no machine. In no category, and no part of any cost.
        in_view: how many of its members were in a view.
        like: its kind of fault, or the kind that it looks like where none explains it.
        domain: the failure domain that was lost as a whole by it, with its number of nodes and ranks; empty: none was.
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
    in_view: int = 0
    like: str = ""
    domain: str = ""

    @property
    def cost_s(self) -> float:
        return sum(self.cost.values())


@dataclass(frozen=True, slots=True)
class Rollback:
    """At ``at_s`` the run went back to ``to_step``, a kept step, and ``steps`` did not count any more."""

    at_s: float
    to_step: int
    steps: int


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """Sums and peaks of all processes of a slot: peak memory on the host and of its GPU, and sent bytes.

    ``hidden_s`` of the exchange went on while they computed, in ``exchanges`` of gradients that measured it: ``ahead_bytes`` of
    ``received_bytes`` had arrived when they were done. GPUs have taken ``energy_j`` in ``metered_s`` seconds.
    """

    peak_bytes: int = 0
    device_peak_bytes: int = 0
    sent_bytes: int = 0
    exchanges: int = 0
    hidden_s: float = 0.0
    received_bytes: int = 0
    ahead_bytes: int = 0
    energy_j: float = 0.0
    metered_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tallies:
    """Counts beside the ledger's time. Times are on the run's clock, None before the first. ``decisions`` are by (policy, action),
    ``refused`` connections by (listener, reason). ``pending_s``: the time of the request for the oldest checkpoint that is neither durable
    nor given up; None without one.

    ``standing_by``: live processes without a shard. ``worst_slot_losses``: losses of the slot with the most. ``score``: the score of the
    detectors of slow ranks. ``usage`` is by slot.
    """

    last_commit_s: float | None
    last_durable_s: float | None
    pending_s: float | None
    checkpoint_bytes: int
    standing_by: int
    worst_slot_losses: int
    ranks_by_node: Mapping[str, int]
    decisions: Mapping[tuple[str, str], int]
    refused: Mapping[tuple[str, str], int]
    score: Score = field(default_factory=Score)
    usage: Mapping[int, SlotUsage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """The ledger at ``now_s``. Rank-seconds unless named otherwise.

    ``categories`` and ``pending_s`` together are ``rank_s``: ``slots x held``. ``down_s`` is the time in which the run was stopped and held
    no machine. It is in no rank-second, and ``held_s`` is the rest of the wall time. ``pending_s`` has no category yet: steps in flight,
    and time without a report. It is 0 once the run has ended; goodput, ETTR and the like leave it out. ``training_goodput`` is the goodput
    of the ``training_s`` seconds in which the run trained (see ``fleet.ledger.stretches``). ``ends``: for each stretch between stops, the
    end of its training and its own end. ``terms`` and ``met`` are for ``fleet.ledger.forecast``. ``cold_provision_s`` is the part of
    provision in which slots waited for the first process since the run started or was resumed. ``ranks`` is the mean world of the kept
    steps, by their time.

    ``settled`` and ``reclassified`` never fall. Steps that were committed and later rolled back are in ``settled`` under both their first
    category and ``rework``, and in ``reclassified`` under their first. ``stale_s`` came from processes that had been replaced, and is in no
    category.
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
    history: int
    commits_total: int
    rolled_back_total: int
    median_step_s: float
    rank_steps: int
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
    terms: Terms
    met: Met
    ends: tuple[tuple[float, float], ...]
    rollbacks: tuple[Rollback, ...] = ()
    queued_s: float = 0.0
    samples: SampleCount | None = None
    tariff: Tariff | None = None
    cost: Mapping[str, Any] = field(default_factory=dict)
    store_bill: Mapping[str, float] | None = None
    device: str = ""
    ranks: float = 1.0
    budget_usd: float | None = None
    _once: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """A value that ``make`` derives from this summary alone. It is made at the first call: a scrape or a page calls several times."""
        if key not in self._once:
            self._once[key] = make()
        made: T = self._once[key]
        return made

    @property
    def tariff_now(self) -> Tariff | None:
        """The mean cost of a slot's second; None without a tariff."""
        if self.tariff is None:
            return None
        found = tariff(self.cost, self.measured_w) or self.tariff
        return found.between(self.started_unix_s, self.now_s - self.started_s)

    @property
    def measured_w(self) -> float | None:
        """The mean power of a slot's GPU; None where no GPU reports it."""
        metered_s = sum(used.metered_s for used in self.tallies.usage.values())
        return sum(used.energy_j for used in self.tallies.usage.values()) / metered_s if metered_s else None

    @property
    def bill(self) -> dict[str, Any] | None:
        """The cost of the run, see ``fleet.ledger.bill``; None without a tariff."""
        found = self.tariff_now
        return bill(found, self) if found is not None else None

    @property
    def kept_s(self) -> float:
        """Rank-seconds of kept steps."""
        return sum(self.categories[name] for name in STEP_NAMES)

    @property
    def world_s(self) -> float:
        """Rank-seconds of the world's places that have a category: goodput is a share of them."""
        return self.kept_s / self.goodput if self.goodput else self.decided_s * self.world / (self.world + self.spares)

    @property
    def start_s(self) -> float | None:
        """Mean start-up time of the first processes; None before one has started."""
        return self.uncharged["init"] / (self.world + self.spares) or None

    @property
    def factors(self) -> Factors | None:
        """Goodput as a product, see ``fleet.ledger.factors``; None at the very beginning."""
        return factors(self)

    @property
    def law(self) -> StepLaw:
        """A step by the terms of the Fleet Law, see ``fleet.ledger.step_law``: all 0 before a step is kept."""
        return self.once("law", lambda: step_law(self))

    @property
    def step_law(self) -> StepLaw | None:
        """The same; None before a step is kept."""
        return self.law if self.kept_s > 0 else None

    @property
    def run_shares(self) -> Mapping[str, float]:
        """Shares of all rank-seconds: compute, communication and coordination, and their overlap."""
        return self.once("run_shares", lambda: run_shares(self))

    @property
    def tokens_per_step(self) -> float | None:
        """The train function's figure (``step.batches(tokens=)``); None without one."""
        return self.measurements[TOKENS][1] if TOKENS in self.measurements else None

    @property
    def tokens_per_s(self) -> float | None:
        """At the median step; None without a count of tokens, or before there are two steps."""
        tokens = self.tokens_per_step
        return tokens / self.median_step_s if tokens is not None and self.median_step_s else None

    @property
    def slots(self) -> tuple[Mapping[str, float], ...]:
        """Seconds by category, of each slot; computed at each call."""
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
        """Allocated rank-seconds that have a category."""
        return self.rank_s - self.pending_s
