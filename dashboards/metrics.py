"""Fleet's metrics, computed at scrape from an immutable snapshot of the ledger.

``METRICS`` is the one table: names, labels, help, and the question that each answers. Base units, unit last in the name. Counters never
fall within a run: steps that are rolled back stay in ``fleet_rank_seconds_total`` and are counted again, under their first category, in
``fleet_reclassified_rank_seconds_total``; the difference of the two is what is true now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fleet.ledger_summary import COST_NAMES, LedgerSummary

COUNTER, GAUGE = "counter", "gauge"
Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: ``read`` gives its samples, as label values and a number, from a snapshot."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    question: str
    read: Callable[[LedgerSummary], Samples]


def _one(value: Callable[[LedgerSummary], float]) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [((), value(summary))]


def _by_name(value: Callable[[LedgerSummary], Any]) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [((name,), number) for name, number in value(summary).items()]


def _optional(value: Callable[[LedgerSummary], float | None]) -> Callable[[LedgerSummary], Samples]:
    return lambda summary: [] if (number := value(summary)) is None else [((), number)]


def _fault_costs(summary: LedgerSummary) -> Samples:
    """By component, so that the number of series does not grow with the number of faults."""
    sums: dict[tuple[str, str], float] = {}
    for item in summary.incidents:
        for name in COST_NAMES:
            key = (item.component, name)
            sums[key] = sums.get(key, 0.0) + item.cost[name]
    return list(sums.items())


def _run_info(summary: LedgerSummary) -> Samples:
    return [((summary.run, summary.status), 1.0)]


def _faults(summary: LedgerSummary) -> Samples:
    return list(summary.faults_by_kind_phase.items())


METRICS = (
    MetricSpec(
        "fleet_run_info", GAUGE, ("run", "status"), "1 for the run that is watched.", "Which run is this, and does it run?", _run_info
    ),
    MetricSpec(
        "fleet_rank_seconds_total",
        COUNTER,
        ("category",),
        "Rank-seconds decided so far, by ledger category.",
        "Where does the time that we pay for go?",
        _by_name(lambda s: s.settled),
    ),
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
        "fleet_wall_seconds", GAUGE, (), "Seconds since the run started.", "How long has it been running?", _one(lambda s: s.wall_s)
    ),
    MetricSpec(
        "fleet_goodput_ratio",
        GAUGE,
        (),
        "Rank-seconds of committed, never rolled back steps over world x wall.",
        "How much of the run is training?",
        _one(lambda s: s.goodput),
    ),
    MetricSpec(
        "fleet_scheduling_goodput_ratio",
        GAUGE,
        (),
        "The same over (world + spares) x wall.",
        "And of all that is allocated, spares included?",
        _one(lambda s: s.scheduling_goodput),
    ),
    MetricSpec(
        "fleet_ettr_ratio",
        GAUGE,
        (),
        "Wall time of committed steps over wall time.",
        "How often does it make progress at all?",
        _one(lambda s: s.ettr),
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
    MetricSpec("fleet_lineage", GAUGE, (), "Number of the present history.", "How often was it rolled back?", _one(lambda s: s.lineage)),
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
        _by_name(lambda s: s.checkpoints_by_phase),
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
        _optional(lambda s: s.checkpoint_interval_s),
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
        "fleet_measurement",
        GAUGE,
        ("name",),
        "The newest value of each figure that the training program reports.",
        "Does it learn?",
        lambda s: [((name,), value) for name, (_, value) in s.measurements.items()],
    ),
)


class FleetCollector(Collector):
    """Reads one snapshot a scrape; registers without reading any.

    Args:
        provide: the newest summary, or None before there is one. Called from the scraping thread: it must hand out a finished summary, not
            walk a ledger that another thread folds into.
    """

    def __init__(self, provide: Callable[[], LedgerSummary | None]) -> None:
        self._provide = provide

    def describe(self) -> Iterator[Metric]:
        return (_family(spec) for spec in METRICS)

    def collect(self) -> Iterator[Metric]:
        summary = self._provide()
        if summary is None:
            return
        for spec in METRICS:
            family = _family(spec)
            for labels, value in spec.read(summary):
                family.add_metric(labels, value)
            yield family


def _family(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if spec.kind == COUNTER else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=spec.labels)


def serve_metrics(provide: Callable[[], LedgerSummary | None], host: str = "127.0.0.1", port: int = 0) -> tuple[Any, Thread]:
    """Serve ``/metrics`` on ``host:port`` from a thread of its own, by prometheus_client's server.

    Returns the server (``server.server_port`` is the port that was taken when ``port`` is 0; ``server.shutdown()`` ends it) and its thread.
    Raises OSError when the port is in use.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(provide))
    server, thread = start_http_server(port, host, registry)
    return server, thread


def metrics_table() -> str:
    """The table of metrics as Markdown, for the documentation."""
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(m.labels) or '-'} | {m.help} | {m.question} |" for m in METRICS]
    return "\n".join(["| metric | kind | labels | meaning | question |", "|---|---|---|---|---|", *rows])
