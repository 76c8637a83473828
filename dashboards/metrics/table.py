"""Fleet's metrics, computed at scrape from an immutable snapshot of the ledger.

``METRICS`` is the one table: names, labels, help, and the question that each answers. Base units, unit last in the name. Counters never
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
from dashboards.metrics.spec import COUNTER, GAUGE, MetricSpec, Samples, optional
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
    return [((name,), value) for name, value in zip(("compute", "comm", "sync", "data"), summary.law.parts_s, strict=True)]


def _shares(which: str) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [((term.name,), getattr(term, which)) for term in predict(summary).terms]


def _faults(summary: LedgerSummary) -> Samples:
    """Each kind's ``executed`` exists from the start, as Grafana marks its increase."""
    return list((dict.fromkeys(((kind, "executed") for kind in EXECUTABLE), 0) | dict(summary.faults_by_kind_phase)).items())


METRICS = (
    MetricSpec(
        "fleet_run_info",
        GAUGE,
        ("status",),
        "1 for each run that is watched; `silent` is one that has no end and that nobody writes any more.",
        "Which runs are there, and do they go on?",
        lambda s: [((s.status,), 1.0)],
    ),
    MetricSpec(
        "fleet_rank_seconds_total",
        COUNTER,
        ("category",),
        "Rank-seconds decided so far, by ledger category.",
        "Where does the time that we pay for go?",
        _by_name(lambda s: s.settled),
    ),
    *COST_METRICS,
    MetricSpec(
        "fleet_reclassified_rank_seconds_total",
        COUNTER,
        ("category",),
        "Rank-seconds of steps rolled back, by their first category.",
        "How much of what looked like progress was taken back?",
        _by_name(lambda s: s.reclassified),
    ),
    MetricSpec(
        "fleet_pending_rank_seconds",
        GAUGE,
        (),
        "Rank-seconds not decided yet: steps in flight, time not yet reported.",
        "How far is the ledger behind?",
        _one(lambda s: s.rank_s + sum(s.reclassified.values()) - sum(s.settled.values())),
    ),
    MetricSpec(
        "fleet_wall_seconds",
        GAUGE,
        (),
        "Seconds since the run started in which it held machines.",
        "How long has it been running?",
        _one(lambda s: s.held_s),
    ),
    MetricSpec(
        "fleet_down_seconds",
        GAUGE,
        (),
        "Seconds in which the run was stopped and nobody held a machine: in no other figure.",
        "How long did nobody pay for it?",
        _one(lambda s: s.down_s),
    ),
    MetricSpec(
        "fleet_goodput_ratio",
        GAUGE,
        (),
        "Rank-seconds of committed, never rolled back steps over those of the world's slots, pending ones left out.",
        "How much of the run is training?",
        _one(lambda s: s.goodput),
    ),
    MetricSpec(
        "fleet_scheduling_goodput_ratio",
        GAUGE,
        (),
        "The same over those of all slots, spares included.",
        "And of all that is allocated, spares included?",
        _one(lambda s: s.scheduling_goodput),
    ),
    MetricSpec(
        "fleet_ettr_ratio",
        GAUGE,
        (),
        "Wall time of committed steps over wall time, pending time left out.",
        "How often does it make progress at all?",
        _one(lambda s: s.ettr),
    ),
    MetricSpec(
        "fleet_forecast_goodput_ratio",
        GAUGE,
        ("bound",),
        "Goodput of the training ahead, for as long as it has trained so far: its mean, and the low and high end of its 90% interval.",
        "What will be left of it?",
        foretold(lambda found: found.goodput),
    ),
    MetricSpec(
        "fleet_forecast_faults",
        GAUGE,
        ("bound",),
        "Faults that come in that time.",
        "How many will come?",
        foretold(lambda found: found.faults),
    ),
    MetricSpec(
        "fleet_forecast_fault_rate_per_second",
        GAUGE,
        ("kind", "bound"),
        "How often faults of each kind come, from what was known before the run and what it has met.",
        "Which kind of fault is to be expected?",
        rates,
    ),
    MetricSpec(
        "fleet_forecasts_total",
        COUNTER,
        ("truth",),
        "Forecasts of the number of faults whose time is over, by whether the truth was inside their 90% interval.",
        "Is the forecast right as often as it says?",
        scores,
    ),
    MetricSpec(
        "fleet_training_goodput_ratio",
        GAUGE,
        (),
        "Goodput between start-up and end.",
        "How much of its training does it keep?",
        _one(lambda s: s.training_goodput),
    ),
    MetricSpec(
        "fleet_other_ratio",
        GAUGE,
        (),
        "Share of rank-seconds that nobody recorded.",
        "Can the ledger be trusted?",
        _one(lambda s: s.other_ratio),
    ),
    MetricSpec(
        "fleet_steps_committed_total",
        COUNTER,
        (),
        "Steps committed, repeated ones again.",
        "How fast does it step?",
        _one(lambda s: s.commits_total),
    ),
    MetricSpec(
        "fleet_steps_rolled_back_total",
        COUNTER,
        (),
        "Committed steps that were rolled back.",
        "How many steps were lost?",
        _one(lambda s: s.rolled_back_total),
    ),
    MetricSpec("fleet_step", GAUGE, (), "Committed steps of the present history.", "How far is it?", _one(lambda s: s.steps)),
    MetricSpec(
        "fleet_step_median_seconds",
        GAUGE,
        (),
        "Median time between commits, of the newest 4096.",
        "How long is a step?",
        _one(lambda s: s.median_step_s),
    ),
    MetricSpec("fleet_history", GAUGE, (), "Number of the present history.", "How often was it rolled back?", _one(lambda s: s.history)),
    MetricSpec("fleet_world_size", GAUGE, (), "Ranks the run was asked to have.", "How many ranks should train?", _one(lambda s: s.world)),
    MetricSpec("fleet_view_size", GAUGE, (), "Ranks in the present view.", "How many ranks do train?", _one(lambda s: s.view_size)),
    MetricSpec(
        "fleet_view_generation", GAUGE, (), "Generation of the newest view.", "When did membership change?", _one(lambda s: s.generation)
    ),
    MetricSpec("fleet_views_total", COUNTER, (), "Views published.", "How often does membership change?", _one(lambda s: s.views_total)),
    MetricSpec(
        "fleet_losses_total",
        COUNTER,
        (),
        "Processes lost, in a view or not.",
        "How often does something break?",
        _one(lambda s: s.losses_total),
    ),
    MetricSpec("fleet_faults_total", COUNTER, ("kind", "phase"), "Injected faults, by kind and phase.", "What does chaos do?", _faults),
    MetricSpec(
        "fleet_fault_cost_rank_seconds",
        GAUGE,
        ("component", "category"),
        "Rank-seconds charged to faults and losses.",
        "Which component costs us most?",
        _fault_costs,
    ),
    MetricSpec(
        "fleet_checkpoints_total",
        COUNTER,
        ("phase",),
        "Durable checkpoints, by phase.",
        "Are checkpoints being written?",
        _by_name(lambda s: dict.fromkeys(CHECKPOINT_PHASES, 0) | dict(s.checkpoints_by_phase)),
    ),
    MetricSpec(
        "fleet_peer_copies_total",
        COUNTER,
        ("phase",),
        "Copies of the state in the memory of other nodes, by phase.",
        "Could we go on from memory?",
        _by_name(lambda s: s.copies_by_phase),
    ),
    MetricSpec(
        "fleet_peer_copy_interval_seconds",
        GAUGE,
        (),
        "Time between copies in memory that the policy aims at.",
        "How far would the loss of all ranks set us back?",
        optional(lambda s: s.copy_interval_s),
    ),
    MetricSpec(
        "fleet_checkpoint_step",
        GAUGE,
        (),
        "Step of the newest durable checkpoint.",
        "How much is at risk?",
        _one(lambda s: s.checkpoint_step),
    ),
    MetricSpec(
        "fleet_checkpoint_interval_seconds",
        GAUGE,
        (),
        "Time between durable checkpoints that the policy aims at.",
        "How often should it save?",
        optional(lambda s: s.checkpoint_interval_s),
    ),
    MetricSpec(
        "fleet_checkpoint_blocked_seconds",
        GAUGE,
        (),
        "What the newest one blocked the loop for.",
        "What does saving cost?",
        _one(lambda s: s.checkpoint_blocked_s),
    ),
    MetricSpec(
        "fleet_checkpoint_latency_seconds",
        GAUGE,
        (),
        "How long it took to be durable.",
        "How old is what we could go back to?",
        _one(lambda s: s.checkpoint_latency_s),
    ),
    MetricSpec(
        "fleet_checkpoint_bytes",
        GAUGE,
        (),
        "Size of the newest durable checkpoint.",
        "How much is written?",
        _one(lambda s: s.tallies.checkpoint_bytes),
    ),
    MetricSpec(
        "fleet_checkpoint_timestamp_seconds",
        GAUGE,
        (),
        "Unix time of the newest durable checkpoint.",
        "Is one overdue?",
        _moment(lambda s: s.tallies.last_durable_s),
    ),
    MetricSpec(
        "fleet_start_timestamp_seconds", GAUGE, (), "Unix time of the run's start.", "When did it start?", _moment(lambda s: s.started_s)
    ),
    MetricSpec("fleet_queued_seconds", GAUGE, (), "How long it waited in the queue.", "Is there room enough?", _one(lambda s: s.queued_s)),
    MetricSpec(
        "fleet_commit_timestamp_seconds",
        GAUGE,
        (),
        "Unix time of the newest commit.",
        "Does it make progress?",
        _moment(lambda s: s.tallies.last_commit_s),
    ),
    MetricSpec(
        "fleet_spares_wanted",
        GAUGE,
        (),
        "Spares that the run was asked to have.",
        "How many may fail at once without a smaller world?",
        _one(lambda s: s.spares),
    ),
    MetricSpec(
        "fleet_spares",
        GAUGE,
        (),
        "Live processes that stand by, or still start.",
        "How many may fail now?",
        _one(lambda s: s.tallies.standing_by),
    ),
    MetricSpec(
        "fleet_worst_slot_losses_total",
        COUNTER,
        (),
        "Losses of the slot that lost its process most often.",
        "Does one rank crash again and again?",
        _one(lambda s: s.tallies.worst_slot_losses),
    ),
    MetricSpec(
        "fleet_refused_lines_total",
        COUNTER,
        ("listener", "reason"),
        "Connections that coordinator, agents and ranks have refused or ended, by listener and reason.",
        "Does anybody come who does not belong to the run?",
        lambda s: list((dict.fromkeys(WRONG_SECRET, 0) | dict(s.tallies.refused)).items()),
    ),
    MetricSpec(
        "fleet_slowdowns_injected_total",
        COUNTER,
        (),
        "Slowdowns that chaos has injected.",
        "How many slow ranks are there to be found?",
        _one(lambda s: s.tallies.score.injected),
    ),
    MetricSpec(
        "fleet_slowdowns_found_total",
        COUNTER,
        (),
        "Slowdowns that chaos has injected and a detector has found.",
        "Are slow ranks found (recall)?",
        _one(lambda s: s.tallies.score.found),
    ),
    MetricSpec(
        "fleet_accusations_total",
        COUNTER,
        ("right",),
        "Ranks that were said to be slow in a run whose chaos slows ranks down, by whether it had slowed this one.",
        "Is only who is slow said to be (precision)?",
        lambda s: [(("yes",), s.tallies.score.right), (("no",), s.tallies.score.wrong)],
    ),
    MetricSpec(
        "fleet_decisions_total",
        COUNTER,
        ("policy", "action"),
        "Decisions of the policies, where they changed.",
        "What does Fleet do about it?",
        lambda s: list((dict.fromkeys(RARE_DECISIONS, 0) | dict(s.tallies.decisions)).items()),
    ),
    MetricSpec(
        "fleet_step_part_seconds",
        GAUGE,
        ("term",),
        "Mean of each part of a step, per rank: the terms of the Fleet Law.",
        "What is a step made of, and which term to attack?",
        _law,
    ),
    MetricSpec(
        "fleet_predicted_goodput_ratio",
        GAUGE,
        (),
        "Goodput that the run should have by now, given the faults that came and what each should cost.",
        "Is it as good as it should be?",
        _one(lambda s: predict(s).goodput),
    ),
    MetricSpec(
        "fleet_predicted_loss_ratio",
        GAUGE,
        ("term",),
        "Predicted loss of goodput, by cause.",
        "What should each cause cost?",
        _shares("predicted"),
    ),
    MetricSpec(
        "fleet_measured_loss_ratio",
        GAUGE,
        ("term",),
        "Measured loss of goodput, by the same causes.",
        "And what does it cost?",
        _shares("measured"),
    ),
    MetricSpec(
        "fleet_node_ranks", GAUGE, ("node",), "Live processes of the run on each node, of at most 256 nodes.", "Who is where?", _nodes
    ),
    MetricSpec(
        "fleet_slot_seconds",
        GAUGE,
        ("slot", "part"),
        "Seconds of each slot: computing, waiting in a step, lost. In runs of up to 256 slots, unless asked for.",
        "Which rank is slow, and which one loses time?",
        _parts,
        per_rank=True,
    ),
    MetricSpec(
        "fleet_memory_peak_bytes",
        GAUGE,
        ("slot",),
        "The most memory that any process of a slot has had on its host. In runs of up to 256 slots, unless asked for.",
        "How much room is left on a host?",
        _used("peak_bytes"),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_device_memory_peak_bytes",
        GAUGE,
        ("slot",),
        "The most memory of its GPU that any process of a slot has had; 0 on a CPU.",
        "And on a GPU?",
        _used("device_peak_bytes"),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_sent_bytes_total",
        COUNTER,
        ("slot",),
        "Bytes that the processes of a slot have sent to other ranks.",
        "What does the network carry?",
        _used("sent_bytes"),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_exchange_hidden_seconds_total",
        COUNTER,
        ("slot",),
        "Seconds of the exchange of gradients that went on while a slot's processes computed; the rest is `exposed_comm`.",
        "How much of the exchange costs no time?",
        _used("hidden_s"),
        per_rank=True,
    ),
    MetricSpec(
        "fleet_measurement",
        GAUGE,
        ("name",),
        "The newest value of each of up to 64 figures that the training program reports.",
        "Does it learn?",
        _measured,
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
    kind = CounterMetricFamily if spec.kind == COUNTER else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=("run", *spec.labels))
