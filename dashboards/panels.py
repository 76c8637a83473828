"""What Fleet's Grafana dashboards show: each panel answers a question, from the table of metrics. ``dashboards/grafana.py`` builds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dashboards.metrics import METRICS, MetricSpec
from dashboards.rules import RUNNING

LINES, NUMBER, BARS = "timeseries", "stat", "bargauge"
SHARE, SECONDS, BYTES, COUNT = "percentunit", "s", "bytes", "short"
RUN = 'run="$run"'
STEP_TERMS = {"compute": "compute", "comm": "communication", "sync": "straggler wait", "data": "data wait"}


@dataclass(frozen=True, slots=True)
class Panel:
    """``queries`` are (expression, legend); ``$run`` is the chosen run, ``$__rate_interval`` four scrapes or more. ``width`` of 24."""

    title: str
    question: str
    queries: tuple[tuple[str, str], ...]
    unit: str = COUNT
    kind: str = LINES
    width: int = 12
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. ``of_a_run``: it has a variable to choose the run, and marks its faults."""

    uid: str
    title: str
    rows: dict[str, tuple[Panel, ...]] = field(default_factory=dict)
    of_a_run: bool = True


def _now(title: str, question: str, expr: str, unit: str = COUNT) -> Panel:
    return Panel(title, question, ((expr, ""),), unit, NUMBER, 4)


def _lines(title: str, question: str, unit: str, *queries: tuple[str, str], stacked: bool = False) -> Panel:
    return Panel(title, question, queries, unit, stacked=stacked)


OVERVIEW = Board(
    "fleet-overview",
    "Fleet: all runs",
    of_a_run=False,
    rows={
        "Now": (
            _now("Runs", "How many runs go on?", 'count(fleet_run_info{status="running"}) or vector(0)'),
            _now("Ranks", "How many ranks train?", f"sum(fleet_view_size {RUNNING}) or vector(0)"),
            _now(
                "Goodput",
                "How much of all that is paid for is training?",
                f"sum((fleet_goodput_ratio * fleet_world_size) {RUNNING}) / sum(fleet_world_size {RUNNING})",
                SHARE,
            ),
            _now("Spares", "How many may fail now?", f"sum(fleet_spares {RUNNING}) or vector(0)"),
            _now("Processes lost", "How often does something break?", "sum(fleet_losses_total)"),
            _now("Alerts", "Is anything wrong?", 'count(ALERTS{alertstate="firing",alertname=~"Fleet.*"}) or vector(0)'),
        ),
        "Runs": (
            _lines("Goodput of each run", "Which run loses time?", SHARE, ("fleet_goodput_ratio", "{{run}}")),
            _lines("Goodput in the last five minutes", "Which run loses time now?", SHARE, ("fleet:goodput:ratio_rate5m", "{{run}}")),
            _lines(
                "Steps a second", "Which run makes progress?", COUNT, ("rate(fleet_steps_committed_total[$__rate_interval])", "{{run}}")
            ),
            _lines(
                "Ranks of each run",
                "Whose world is smaller than it should be?",
                COUNT,
                ("fleet_view_size", "{{run}}"),
                ("fleet_world_size", "{{run}} wanted"),
            ),
        ),
    },
)

ONE_RUN = Board(
    "fleet-run",
    "Fleet: one run",
    rows={
        "Now": (
            _now("Goodput", "How much of the run is training?", f"fleet_goodput_ratio{{{RUN}}}", SHARE),
            _now("Predicted", "And how much should be?", f"fleet_predicted_goodput_ratio{{{RUN}}}", SHARE),
            _now("Drift", "How far is it from what was expected at its start?", f"fleet_goodput_drift_ratio{{{RUN}}}", SHARE),
            _now("Step", "How far is it?", f"fleet_step{{{RUN}}}"),
            _now("Ranks", "How many train?", f"fleet_view_size{{{RUN}}}"),
            _now("Since the newest commit", "Does it make progress?", f"time() - fleet_commit_timestamp_seconds{{{RUN}}}", SECONDS),
            _now("Rolled back", "How many steps were lost?", f"fleet_steps_rolled_back_total{{{RUN}}}"),
            _now("Queued", "How long did it wait for room?", f"fleet_queued_seconds{{{RUN}}}", SECONDS),
            _now("Stopped", "How long did nobody hold a machine?", f"fleet_down_seconds{{{RUN}}}", SECONDS),
        ),
        "Where does the time go?": (
            Panel(
                "Goodput waterfall",
                "What of all rank-seconds went where?",
                ((f"sort_desc(fleet_rank_seconds_total{{{RUN}}} > 0)", "{{category}}"),),
                SECONDS,
                BARS,
            ),
            _lines(
                "The ledger over time",
                "And when?",
                COUNT,
                (f"rate(fleet_rank_seconds_total{{{RUN}}}[$__rate_interval])", "{{category}}"),
                stacked=True,
            ),
            _lines(
                "Goodput over time",
                "Is it getting better?",
                SHARE,
                (f"fleet_goodput_ratio{{{RUN}}}", "since the start"),
                (f"fleet:goodput:ratio_rate5m{{{RUN}}}", "last five minutes"),
                (f"fleet_predicted_goodput_ratio{{{RUN}}}", "predicted"),
                (f"fleet_expected_goodput_ratio{{{RUN}}}", "expected at the start"),
            ),
            _lines(
                "Goodput while training",
                "Is the drift more than chance?",
                SHARE,
                (f"fleet_training_goodput_ratio{{{RUN}}}", "measured"),
                (f"fleet_expected_goodput_bound_ratio{{{RUN}}}", "expected, {{bound}}"),
            ),
            _lines(
                "What a step is made of",
                "Which term of the Fleet Law to attack?",
                SECONDS,
                (f"fleet_step_part_seconds{{{RUN}}}", "{{term}}"),
                stacked=True,
            ),
            Panel(
                "Predicted beside measured loss",
                "Does each cause cost what it should?",
                (
                    (f"fleet_predicted_loss_ratio{{{RUN}}}", "{{term}}, predicted"),
                    (f"fleet_measured_loss_ratio{{{RUN}}}", "{{term}}, measured"),
                ),
                SHARE,
                BARS,
            ),
            _lines("What the program reports", "Does it learn?", COUNT, (f"fleet_measurement{{{RUN}}}", "{{name}}")),
            _lines(
                "Taken back",
                "How much of what looked like progress was not?",
                SECONDS,
                (f"fleet_reclassified_rank_seconds_total{{{RUN}}}", "{{category}}"),
            ),
            _lines(
                "Not decided yet",
                "How far is the ledger behind, and what did nobody record?",
                SECONDS,
                (f"fleet_pending_rank_seconds{{{RUN}}}", "pending"),
                (f"fleet_other_ratio{{{RUN}}} * fleet_wall_seconds{{{RUN}}}", "recorded by nobody"),
            ),
        ),
    },
)

RANKS = Board(
    "fleet-ranks",
    "Fleet: ranks and nodes",
    rows={
        "Membership": (
            _lines(
                "Ranks",
                "How many train, how many stand by?",
                COUNT,
                (f"fleet_view_size{{{RUN}}}", "in the view"),
                (f"fleet_spares{{{RUN}}}", "spares"),
                (f"fleet_world_size{{{RUN}}}", "wanted"),
            ),
            _lines(
                "Views and losses",
                "How often does membership change?",
                COUNT,
                (f"fleet_views_total{{{RUN}}}", "views"),
                (f"fleet_losses_total{{{RUN}}}", "processes lost"),
                (f"fleet_worst_slot_losses_total{{{RUN}}}", "of the worst slot"),
            ),
            _lines("Ranks on each node", "Who is where?", COUNT, (f"fleet_node_ranks{{{RUN}}}", "{{node}}"), stacked=True),
            _lines("Decisions", "What does Fleet do about it?", COUNT, (f"fleet_decisions_total{{{RUN}}}", "{{policy}} {{action}}")),
        ),
        "Ranks": (
            _lines(
                "Share of time spent computing",
                "Which rank is slow?",
                SHARE,
                (f'rate(fleet_slot_seconds{{{RUN},part="compute"}}[$__rate_interval])', "slot {{slot}}"),
            ),
            _lines(
                "Share of time spent waiting in a step",
                "Which ranks wait for it?",
                SHARE,
                (f'rate(fleet_slot_seconds{{{RUN},part="wait"}}[$__rate_interval])', "slot {{slot}}"),
            ),
            Panel("Time lost", "Which slot loses time?", ((f'fleet_slot_seconds{{{RUN},part="lost"}}', "slot {{slot}}"),), SECONDS, BARS),
            _lines("Step", "How long is a step?", SECONDS, (f"fleet_step_median_seconds{{{RUN}}}", "median")),
        ),
    },
)

CHECKPOINTS = Board(
    "fleet-checkpoints",
    "Fleet: checkpoints and storage",
    rows={
        "Checkpoints": (
            _lines(
                "Age of the newest",
                "How much is at risk?",
                SECONDS,
                (f"time() - fleet_checkpoint_timestamp_seconds{{{RUN}}}", "age"),
                (f"fleet_checkpoint_interval_seconds{{{RUN}}}", "interval"),
            ),
            _lines("Written", "Do they succeed?", COUNT, (f"fleet_checkpoints_total{{{RUN}}}", "{{phase}}")),
            _lines("Blocked", "What does saving cost the loop?", SECONDS, (f"fleet_checkpoint_blocked_seconds{{{RUN}}}", "blocked")),
            _lines(
                "Until durable", "How long until one can be relied on?", SECONDS, (f"fleet_checkpoint_latency_seconds{{{RUN}}}", "latency")
            ),
            _lines("Size", "How much is written?", BYTES, (f"fleet_checkpoint_bytes{{{RUN}}}", "bytes")),
            _lines(
                "Steps at risk",
                "How many steps would be done again?",
                COUNT,
                (f"fleet_step{{{RUN}}} - fleet_checkpoint_step{{{RUN}}}", "steps"),
            ),
            _lines(
                "Rank-seconds stalled",
                "And in the ledger?",
                SECONDS,
                (f'fleet_rank_seconds_total{{{RUN},category=~"checkpoint_stall|restore"}}', "{{category}}"),
            ),
        ),
        "Copies in memory": (
            _lines("Made", "Could we go on from memory?", COUNT, (f"fleet_peer_copies_total{{{RUN}}}", "{{phase}}")),
            _lines(
                "Interval",
                "How far would the loss of all ranks set us back?",
                SECONDS,
                (f"fleet_peer_copy_interval_seconds{{{RUN}}}", "interval"),
            ),
        ),
    },
)

CHAOS = Board(
    "fleet-chaos",
    "Fleet: chaos experiment",
    rows={
        "Faults": (
            _lines(
                "Faults",
                "What was planned, executed, suppressed, healed?",
                COUNT,
                (f"fleet_faults_total{{{RUN}}} > 0", "{{kind}} {{phase}}"),
            ),
            Panel(
                "Cost by component",
                "Which component costs most?",
                ((f"sum by (component) (fleet_fault_cost_rank_seconds{{{RUN}}})", "{{component}}"),),
                SECONDS,
                BARS,
            ),
            Panel(
                "Cost by category",
                "And in which way?",
                ((f"sum by (category) (fleet_fault_cost_rank_seconds{{{RUN}}})", "{{category}}"),),
                SECONDS,
                BARS,
            ),
            _lines(
                "Goodput under chaos",
                "Does it hold its goodput?",
                SHARE,
                (f"fleet_goodput_ratio{{{RUN}}}", "measured"),
                (f"fleet_predicted_goodput_ratio{{{RUN}}}", "predicted"),
                (f"fleet_ettr_ratio{{{RUN}}}", "ETTR"),
                (f"fleet_scheduling_goodput_ratio{{{RUN}}}", "with spares"),
            ),
            _lines("Ranks in training", "How fast does the world recover?", COUNT, (f"fleet_view_size{{{RUN}}}", "in the view")),
            _lines(
                "Generation and history",
                "Was anything rolled back?",
                COUNT,
                (f"fleet_view_generation{{{RUN}}}", "generation"),
                (f"fleet_lineage{{{RUN}}}", "lineage"),
            ),
        ),
    },
)

UNITS = {"seconds": SECONDS, "ratio": SHARE, "bytes": BYTES}
"""By the last word of a metric's name."""
FOR_ALERTS = {"fleet_start_timestamp_seconds", "fleet_spares_wanted"}
"""Metrics that only alerts read."""


def shown_nowhere(specs: Iterable[MetricSpec], boards: Iterable[Board]) -> tuple[Panel, ...]:
    """A plain panel for each metric that none of ``boards`` asks for: who adds a metric need not draw it."""
    asked = " ".join(expr for board in boards for row in board.rows.values() for panel in row for expr, _ in panel.queries)
    rest = [spec for spec in specs if f"{spec.name}{{" not in asked and f"{spec.name} " not in asked and spec.name not in FOR_ALERTS]
    return tuple(_plain(spec) for spec in rest)


def _plain(spec: MetricSpec) -> Panel:
    words = spec.name.removeprefix("fleet_").removesuffix("_total").split("_")
    legend = " ".join(f"{{{{{label}}}}}" for label in spec.labels)
    return _lines(" ".join(words).capitalize(), spec.question, UNITS.get(words[-1], COUNT), (f"{spec.name}{{{RUN}}}", legend))


def _complete(boards: tuple[Board, ...]) -> tuple[Board, ...]:
    """With the metrics that no panel was made for on the board of one run."""
    rest = shown_nowhere(METRICS, boards)
    return tuple(replace(board, rows={**board.rows, "Others": rest}) if rest and board is ONE_RUN else board for board in boards)


BOARDS = _complete((OVERVIEW, ONE_RUN, RANKS, CHECKPOINTS, CHAOS))


def panels() -> list[tuple[Board, Panel]]:
    """Every panel of every dashboard."""
    return [(board, panel) for board in BOARDS for row in board.rows.values() for panel in row]
