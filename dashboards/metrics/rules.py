"""Recording and alert rules for Prometheus, from the table of metrics. ``docs/runbook.md`` has a section for each alert.

The objective is goodput: of the rank-seconds that the world of a run has, ``OBJECTIVE`` should go into committed steps. What is lost burns
the rest, the budget; an alert fires when a long and a short window both burn it too fast, and clears with the short one (Google's SRE
workbook, chapter 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet.ledger.step_law import STEP_NAMES

OBJECTIVE = 0.95
LATE_S, LATE_STEPS = 120.0, 20
"""A run that has committed nothing for so long, and for so many of its median steps more, makes no progress."""
OVERDUE = 3
"""A checkpoint is overdue after so many intervals."""
STUCK_S, STUCK_LATENCIES = 600.0, 10
"""A checkpoint is stuck after so long, and so many times what the newest one took, more."""
AGAIN, AGAIN_WITHIN = 3, "15m"
"""So many new views within so long are restarts, where the run is no step further after them."""
RUNBOOK = "docs/runbook.md"
STEPS = "|".join(STEP_NAMES)
RUNNING = 'and on (run) fleet_run_info{status="running"} == 1'
UNENDED = 'and on (run) fleet_run_info{status=~"running|silent"} == 1'
"""Of a run whose driver was killed nobody writes the journal any more: it is silent, and has no end."""
PAGE, TICKET = "page", "ticket"
CORRUPT = "evict|stop|go_back|begin_anew"
WINDOWS = ("5m", "30m", "1h", "6h")


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. ``for_s`` is how long ``expr`` must hold. ``meaning`` is its sentence in the runbook."""

    name: str
    expr: str
    for_s: float
    severity: str
    summary: str
    meaning: str

    @property
    def anchor(self) -> str:
        """Its heading in the runbook, as an address has it."""
        return self.name.lower()


def _burns(long: str, short: str, factor: float) -> str:
    least = f"{factor * (1 - OBJECTIVE):g}"
    return f"(fleet:loss:ratio_rate{long} > {least} and fleet:loss:ratio_rate{short} > {least}) {RUNNING}"


def _late(what: str, limit: str, of: str = RUNNING) -> str:
    """The newest ``what``, or the start when there was none, is longer ago than ``limit``."""
    return f"(time() - (fleet_{what}_timestamp_seconds or fleet_start_timestamp_seconds) > {limit}) {of}"


def _unseen() -> str:
    """A target does not answer, or a run that went on when it was last seen is shown by none."""
    went_on = 'last_over_time(fleet_run_info{status="running"}[15m])'
    ended = 'last_over_time(fleet_run_info{status!="running"}[15m])'
    return f'up{{job="fleet"}} == 0 or on (instance) ({went_on} unless on (run) fleet_run_info unless on (run) {ended})'


def _in_vain() -> str:
    views = f"increase(fleet_views_total[{AGAIN_WITHIN}]) > {AGAIN - 0.5:g}"
    return f"({views} and on (run) (fleet_step <= on (run) fleet_step offset {AGAIN_WITHIN})) {UNENDED}"


def _rate(category: str, window: str) -> str:
    return f'sum by (run) (rate(fleet_rank_seconds_total{{category=~"{category}"}}[{window}]))'


ALERTS = (
    Alert(
        "FleetGoodputBurnsFast", _burns("1h", "5m", 10), 0.0, PAGE, "Run {{ $labels.run }} loses more than half of its time.",
        "More than half of the world's rank-seconds were lost in the last hour, and are being lost now: ten times the budget.",
    ),
    Alert(
        "FleetGoodputBurnsSlowly", _burns("6h", "30m", 3), 0.0, TICKET, "Run {{ $labels.run }} loses three times its budget.",
        "More than 15% of the world's rank-seconds were lost in the last six hours, and are being lost now: three times the budget.",
    ),
    Alert(
        "FleetNoProgress", _late("commit", f"{LATE_S:g} + {LATE_STEPS} * fleet_step_median_seconds", UNENDED), 0.0, PAGE,
        "Run {{ $labels.run }} commits no steps.",
        "No step was committed for two minutes and twenty steps' time, and the run has not ended: it hangs, or whoever ran it is gone.",
    ),
    Alert(
        "FleetCrashLoop", "increase(fleet_worst_slot_losses_total[10m]) > 3.5", 0.0, PAGE,
        "A slot of run {{ $labels.run }} loses its process again and again.",
        "One slot lost its process four times within ten minutes.",
    ),
    Alert(
        "FleetSparesExhausted", f"(fleet_spares < 1 and fleet_spares_wanted > 0) {RUNNING}", 120.0, TICKET,
        "Run {{ $labels.run }} has no spare left.",
        "The run was asked to have spares, and none stood by for two minutes: the next loss makes the world smaller.",
    ),
    Alert(
        "FleetCheckpointOverdue", _late("checkpoint", f"{OVERDUE} * fleet_checkpoint_interval_seconds + fleet_checkpoint_latency_seconds"),
        60.0, TICKET, "Run {{ $labels.run }} has no recent durable checkpoint.",
        "The newest durable checkpoint is more than three intervals old.",
    ),
    Alert(
        "FleetStoreFailing",
        '(increase(fleet_checkpoints_total{phase="failed"}[15m]) > 2.5)'
        ' unless on (run) (increase(fleet_checkpoints_total{phase="durable"}[15m]) > 0.5)', 0.0, PAGE,
        "The store of run {{ $labels.run }} takes no checkpoints.",
        "Three checkpoints failed within 15 minutes, and none became durable.",
    ),
    Alert(
        "FleetCorruption", f'sum by (run) (increase(fleet_decisions_total{{policy="corruption",action=~"{CORRUPT}"}}[10m])) > 0.5',
        0.0, PAGE, "Run {{ $labels.run }} found results that are wrong.",
        "A shard that was computed twice gave different bits, and Fleet acted on it within the last ten minutes.",
    ),
    Alert(
        "FleetCheckpointStuck",
        f"(time() - fleet_checkpoint_pending_timestamp_seconds > {STUCK_S:g} + {STUCK_LATENCIES} * fleet_checkpoint_latency_seconds)"
        f" {RUNNING}", 0.0, TICKET, "A checkpoint of run {{ $labels.run }} does not move.",
        "A checkpoint was asked for ten minutes and ten times the usual latency ago, and is neither durable nor given up.",
    ),
    Alert(
        "FleetRestartsInVain", _in_vain(), 0.0, PAGE, "Run {{ $labels.run }} begins again and again, and comes no further.",
        "Within 15 minutes three views were made, by losses or by resumes, and the run is at no later step than before.",
    ),
    Alert(
        "FleetTargetVanished", _unseen(), 60.0, PAGE, "Prometheus sees {{ $labels.instance }} {{ $labels.run }} no more.",
        "A page that Prometheus scrapes does not answer, or shows a run no more that had not ended: no other alert can fire.",
    ),
    Alert(
        "FleetPredictionError", f"(abs(fleet_goodput_ratio - fleet_predicted_goodput_ratio) > 0.1) {RUNNING}", 300.0, TICKET,
        "Goodput of run {{ $labels.run }} is not what its faults explain.",
        "Measured and predicted goodput have differed by more than ten percentage points for five minutes.",
    ),
    Alert(
        "FleetStragglerPersists", f"({_rate('straggler_wait', '5m')} / {_rate(STEPS, '5m')} > 0.25) {RUNNING}", 300.0, TICKET,
        "Ranks of run {{ $labels.run }} wait for a slow one.",
        "For five minutes more than a quarter of all step time was waiting for the slowest rank.",
    ),
)  # fmt: skip


def recordings() -> dict[str, str]:
    """Name -> expression of the recording rules: goodput and its complement over each window, for each run."""
    found = {}
    for window in WINDOWS:
        taken = f"sum by (run) (rate(fleet_reclassified_rank_seconds_total[{window}]))"
        # Over the world that was wanted, and not over what the ledger has decided: while nobody is there, it decides nothing.
        world = f"sum by (run) (rate(fleet_wall_seconds[{window}]) * fleet_world_size)"
        found[f"fleet:goodput:ratio_rate{window}"] = f"({_rate(STEPS, window)} - {taken}) / ({world} > 0)"
        found[f"fleet:loss:ratio_rate{window}"] = f"1 - fleet:goodput:ratio_rate{window}"
    return found


def rules(runbook: str = RUNBOOK) -> dict[str, Any]:
    """The content of a rules file. ``runbook``: URL or path of the runbook, to which each alert links with its own heading."""
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": f"{alert.for_s:g}s",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.meaning, "runbook_url": f"{runbook}#{alert.anchor}"},
        }
        for alert in ALERTS
    ]
    records = [{"record": name, "expr": expr} for name, expr in recordings().items()]
    return {"groups": [{"name": "fleet-goodput", "rules": records}, {"name": "fleet-alerts", "rules": alerts}]}
