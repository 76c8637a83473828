"""Fleet's metrics, computed at scrape from an immutable snapshot of the ledger.

``METRICS`` is the one table: names, labels and help. Base units, unit last in the name. Counters never
fall within a run: steps that are rolled back stay in ``fleet_rank_seconds_total`` and are counted again, under their first category, in
``fleet_reclassified_rank_seconds_total``; the difference of the two is what is true now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dashboards.metrics.cost import COST_METRICS
from dashboards.metrics.foretold import foretold, rates, scores
from dashboards.metrics.spec import MetricSpec, Samples, optional
from fleet.ledger.forecast import predict
from fleet.ledger.slots import STEP_KINDS
from fleet.ledger.summary import COST_NAMES, LedgerSummary
from fleet.protocol.fault_kinds import EXECUTABLE
from fleet.protocol.proof import Purpose, Reason

PER_RANK_UP_TO = 256
MAX_NODES = 256
MAX_MEASUREMENTS = 64
CHECKPOINT_PHASES = ("requested", "durable", "failed", "skipped")
RARE_DECISIONS = [("corruption", action) for action in ("evict", "stop", "go_back", "begin_anew")]
WRONG_SECRET = [(purpose, Reason.SECRET) for purpose in Purpose]
"""Series that alerts watch exist from the start: an increase from nothing to 1 would not be seen."""


def _one(value: Callable[[LedgerSummary], float]) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [((), value(summary))]


def _by_name(value: Callable[[LedgerSummary], Any]) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [((name,), number) for name, number in value(summary).items()]


def _fault_costs(summary: LedgerSummary) -> Samples:
    """By component, so that the number of series does not grow with the number of faults."""
    sums: dict[tuple[str, str], float] = {}
    for item in summary.incidents:
        for name in COST_NAMES:
            key = (item.component, name)
            sums[key] = sums.get(key, 0.0) + item.cost[name]
    return list(sums.items())


def _moment(value: Callable[[LedgerSummary], float | None]) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [] if (at_s := value(summary)) is None else [((), summary.unix_s(at_s))]


def _parts(summary: LedgerSummary) -> Samples:
    """Three sums a slot, so that 10,000 slots are 30,000 series."""
    for slot, us in enumerate(summary.slot_us):
        compute_us, step_us, all_us = us[0], sum(us[:STEP_KINDS]), sum(us)
        for part, value in (("compute", compute_us), ("wait", step_us - compute_us), ("lost", all_us - step_us)):
            yield (str(slot), part), value / 1e6


def _used(field: str) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [((str(slot),), float(getattr(used, field))) for slot, used in sorted(summary.tallies.usage.items())]


def _nodes(summary: LedgerSummary) -> Samples:
    return [((node,), float(ranks)) for node, ranks in sorted(summary.tallies.ranks_by_node.items())[:MAX_NODES]]


def _measured(summary: LedgerSummary) -> Samples:
    return [((name,), value) for name, (_, value) in list(summary.measurements.items())[:MAX_MEASUREMENTS]]


def _law(summary: LedgerSummary) -> Samples:
    return [((name,), value) for name, value in zip(("compute", "comm", "sync", "data", "garbage"), summary.law.parts_s, strict=True)]


def _shares(which: str) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [((term.name,), getattr(term, which)) for term in predict(summary).terms]


def _faults(summary: LedgerSummary) -> Samples:
    """Each kind's ``executed`` exists from the start, as Grafana marks its increase."""
    return list((dict.fromkeys(((kind, "executed") for kind in EXECUTABLE), 0) | dict(summary.faults_by_kind_phase)).items())


METRICS = (
    MetricSpec(
        "fleet_run_info",
        "1 for each run that is watched; `silent` is one that has no end and that nobody writes any more.",
        lambda s: [((s.status,), 1.0)],
        labels=("status",),
    ),
    MetricSpec(
        "fleet_rank_seconds_total",
        "Rank-seconds decided so far, by ledger category.",
        _by_name(lambda s: s.settled),
        labels=("category",),
    ),
    *COST_METRICS,
    MetricSpec(
        "fleet_reclassified_rank_seconds_total",
        "Rank-seconds of steps rolled back, by their first category.",
        _by_name(lambda s: s.reclassified),
        labels=("category",),
    ),
    MetricSpec(
        "fleet_pending_rank_seconds",
        "Rank-seconds not decided yet: steps in flight, time not yet reported.",
        _one(lambda s: s.rank_s + sum(s.reclassified.values()) - sum(s.settled.values())),
    ),
    MetricSpec(
        "fleet_wall_seconds",
        "Seconds since the run started in which it held machines.",
        _one(lambda s: s.held_s),
    ),
    MetricSpec(
        "fleet_down_seconds",
        "Seconds in which the run was stopped and nobody held a machine: in no other figure.",
        _one(lambda s: s.down_s),
    ),
    MetricSpec(
        "fleet_goodput_ratio",
        "Rank-seconds of committed, never rolled back steps over those of the world's slots, pending ones left out.",
        _one(lambda s: s.goodput),
    ),
    MetricSpec(
        "fleet_scheduling_goodput_ratio",
        "The same over those of all slots, spares included.",
        _one(lambda s: s.scheduling_goodput),
    ),
    MetricSpec(
        "fleet_ettr_ratio",
        "Wall time of committed steps over wall time, pending time left out.",
        _one(lambda s: s.ettr),
    ),
    MetricSpec(
        "fleet_forecast_goodput_ratio",
        "Goodput of the training ahead, for as long as it has trained so far: its mean, and the low and high end of its 90% interval.",
        foretold(lambda found: found.goodput),
        labels=("bound",),
    ),
    MetricSpec(
        "fleet_forecast_faults",
        "Faults that come in that time.",
        foretold(lambda found: found.faults),
        labels=("bound",),
    ),
    MetricSpec(
        "fleet_forecast_fault_rate_per_second",
        "How often faults of each kind come, from what was known before the run and what it has met.",
        rates,
        labels=("kind", "bound"),
    ),
    MetricSpec(
        "fleet_forecasts_total",
        "Forecasts of the number of faults whose time is over, by whether the truth was inside their 90% interval.",
        scores,
        labels=("truth",),
    ),
    MetricSpec(
        "fleet_training_goodput_ratio",
        "Goodput between start-up and end.",
        _one(lambda s: s.training_goodput),
    ),
    MetricSpec(
        "fleet_other_ratio",
        "Share of rank-seconds that nobody recorded.",
        _one(lambda s: s.other_ratio),
    ),
    MetricSpec(
        "fleet_steps_committed_total",
        "Steps committed, repeated ones again.",
        _one(lambda s: s.commits_total),
    ),
    MetricSpec(
        "fleet_steps_rolled_back_total",
        "Committed steps that were rolled back.",
        _one(lambda s: s.rolled_back_total),
    ),
    MetricSpec("fleet_step", "Committed steps of the present history.", _one(lambda s: s.steps)),
    MetricSpec(
        "fleet_step_median_seconds",
        "Median time between commits, of the newest 4096.",
        _one(lambda s: s.median_step_s),
    ),
    MetricSpec("fleet_history", "Number of the present history.", _one(lambda s: s.history)),
    MetricSpec("fleet_world_size", "Ranks the run was asked to have.", _one(lambda s: s.world)),
    MetricSpec("fleet_view_size", "Ranks in the present view.", _one(lambda s: s.view_size)),
    MetricSpec("fleet_view_generation", "Generation of the newest view.", _one(lambda s: s.generation)),
    MetricSpec("fleet_views_total", "Views published.", _one(lambda s: s.views_total)),
    MetricSpec(
        "fleet_losses_total",
        "Processes lost, in a view or not.",
        _one(lambda s: s.losses_total),
    ),
    MetricSpec("fleet_faults_total", "Injected faults, by kind and phase.", _faults, labels=("kind", "phase")),
    MetricSpec(
        "fleet_fault_cost_rank_seconds",
        "Rank-seconds charged to faults and losses.",
        _fault_costs,
        labels=("component", "category"),
    ),
    MetricSpec(
        "fleet_checkpoints_total",
        "Durable checkpoints, by phase.",
        _by_name(lambda s: dict.fromkeys(CHECKPOINT_PHASES, 0) | dict(s.checkpoints_by_phase)),
        labels=("phase",),
    ),
    MetricSpec(
        "fleet_peer_copies_total",
        "Copies of the state in the memory of other nodes, by phase.",
        _by_name(lambda s: s.copies_by_phase),
        labels=("phase",),
    ),
    MetricSpec(
        "fleet_peer_copy_interval_seconds",
        "Time between copies in memory that the policy aims at.",
        optional(lambda s: s.copy_interval_s),
    ),
    MetricSpec(
        "fleet_checkpoint_step",
        "Step of the newest durable checkpoint.",
        _one(lambda s: s.checkpoint_step),
    ),
    MetricSpec(
        "fleet_checkpoint_interval_seconds",
        "Time between durable checkpoints that the policy aims at.",
        optional(lambda s: s.checkpoint_interval_s),
    ),
    MetricSpec(
        "fleet_checkpoint_blocked_seconds",
        "What the newest one blocked the loop for.",
        _one(lambda s: s.checkpoint_blocked_s),
    ),
    MetricSpec(
        "fleet_checkpoint_latency_seconds",
        "How long it took to be durable.",
        _one(lambda s: s.checkpoint_latency_s),
    ),
    MetricSpec(
        "fleet_checkpoint_bytes",
        "Size of the newest durable checkpoint.",
        _one(lambda s: s.tallies.checkpoint_bytes),
    ),
    MetricSpec(
        "fleet_checkpoint_timestamp_seconds",
        "Unix time of the newest durable checkpoint.",
        _moment(lambda s: s.tallies.last_durable_s),
    ),
    MetricSpec(
        "fleet_checkpoint_pending_timestamp_seconds",
        "Unix time at which the oldest durable checkpoint was asked for that is neither complete nor given up; none where there is none.",
        _moment(lambda s: s.tallies.pending_s),
    ),
    MetricSpec("fleet_start_timestamp_seconds", "Unix time of the run's start.", _moment(lambda s: s.started_s)),
    MetricSpec("fleet_queued_seconds", "How long it waited in the queue.", _one(lambda s: s.queued_s)),
    MetricSpec(
        "fleet_commit_timestamp_seconds",
        "Unix time of the newest commit.",
        _moment(lambda s: s.tallies.last_commit_s),
    ),
    MetricSpec(
        "fleet_spares_wanted",
        "Spares that the run was asked to have.",
        _one(lambda s: s.spares),
    ),
    MetricSpec(
        "fleet_spares",
        "Live processes that stand by, or still start.",
        _one(lambda s: s.tallies.standing_by),
    ),
    MetricSpec(
        "fleet_worst_slot_losses_total",
        "Losses of the slot that lost its process most often.",
        _one(lambda s: s.tallies.worst_slot_losses),
    ),
    MetricSpec(
        "fleet_refused_lines_total",
        "Connections that coordinator, agents and ranks have refused or ended, by listener and reason.",
        lambda s: list((dict.fromkeys(WRONG_SECRET, 0) | dict(s.tallies.refused)).items()),
        labels=("listener", "reason"),
    ),
    MetricSpec(
        "fleet_slowdowns_injected_total",
        "Slowdowns that chaos has injected.",
        _one(lambda s: s.tallies.score.injected),
    ),
    MetricSpec(
        "fleet_slowdowns_found_total",
        "Slowdowns that chaos has injected and a detector has found.",
        _one(lambda s: s.tallies.score.found),
    ),
    MetricSpec(
        "fleet_accusations_total",
        "Ranks that were said to be slow in a run whose chaos slows ranks down, by whether it had slowed this one.",
        lambda s: [(("yes",), s.tallies.score.right), (("no",), s.tallies.score.wrong)],
        labels=("right",),
    ),
    MetricSpec(
        "fleet_decisions_total",
        "Decisions of the policies, where they changed.",
        lambda s: list((dict.fromkeys(RARE_DECISIONS, 0) | dict(s.tallies.decisions)).items()),
        labels=("policy", "action"),
    ),
    MetricSpec(
        "fleet_step_part_seconds",
        "Mean of each part of a step, per rank: the terms of the Fleet Law.",
        _law,
        labels=("term",),
    ),
    MetricSpec(
        "fleet_predicted_goodput_ratio",
        "Goodput that the run should have by now, given the faults that came and what each should cost.",
        _one(lambda s: predict(s).goodput),
    ),
    MetricSpec(
        "fleet_predicted_loss_ratio",
        "Predicted loss of goodput, by cause.",
        _shares("predicted"),
        labels=("term",),
    ),
    MetricSpec(
        "fleet_measured_loss_ratio",
        "Measured loss of goodput, by the same causes.",
        _shares("measured"),
        labels=("term",),
    ),
    MetricSpec("fleet_node_ranks", "Live processes of the run on each node, of at most 256 nodes.", _nodes, labels=("node",)),
    MetricSpec(
        "fleet_slot_seconds",
        "Seconds of each slot: computing, waiting in a step, lost. In runs of up to 256 slots, unless asked for.",
        _parts,
        labels=("slot", "part"),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_memory_peak_bytes",
        "The most memory that any process of a slot has had on its host. In runs of up to 256 slots, unless asked for.",
        _used("peak_bytes"),
        labels=("slot",),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_device_memory_peak_bytes",
        "The most memory of its GPU that any process of a slot has had; 0 on a CPU.",
        _used("device_peak_bytes"),
        labels=("slot",),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_sent_bytes_total",
        "Bytes that the processes of a slot have sent to other ranks.",
        _used("sent_bytes"),
        labels=("slot",),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_exchange_hidden_seconds_total",
        "Seconds of the exchange of gradients that went on while a slot's processes computed; the rest is `exposed_comm`.",
        _used("hidden_s"),
        labels=("slot",),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_measurement",
        "The newest value of each of up to 64 figures that the training program reports.",
        _measured,
        labels=("name",),
    ),
)


class RunsCollector(Collector):
    """Reads one snapshot of each run at a scrape; registers without reading any. Every series has its run's name as label ``run``.

    Args:
        provide: the newest summaries of the runs that go on. Called from the scraping thread: it must hand out finished summaries, not walk
            ledgers that another thread folds into.
        per_rank: give each slot series of its own; None: in runs of up to ``PER_RANK_UP_TO`` slots.
    """

    def __init__(self, provide: Callable[[], Iterable[LedgerSummary]], per_rank: bool | None = None) -> None:
        self._provide, self._per_rank = provide, per_rank

    def describe(self) -> Iterator[Metric]:
        return (_family(spec) for spec in METRICS)

    def collect(self) -> Iterator[Metric]:
        summaries = list(self._provide())
        if not summaries:
            return
        for spec in METRICS:
            family = _family(spec)
            for summary in summaries:
                if not spec.per_rank or self._wants_ranks(summary):
                    for labels, value in spec.read(summary):
                        family.add_metric((summary.run, *labels), value)
            yield family

    def _wants_ranks(self, summary: LedgerSummary) -> bool:
        return summary.world + summary.spares <= PER_RANK_UP_TO if self._per_rank is None else self._per_rank


def _family(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if spec.counts else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=("run", *spec.labels))
