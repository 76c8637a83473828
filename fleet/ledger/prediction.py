"""What a run's goodput should be by now, from what was known before each fault struck: set beside what the ledger measured.

A fault is expected to cost what its kind costs: a pause of every rank, and the empty seats until replacements train, unless spares take
them. Start-up, and that of each resume, is taken as measured; a checkpoint costs what the newest one blocked, once in an interval. All is
said of the time of which it is known where it went.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.ledger.expectation import REFILL_S, STALL_S
from fleet.ledger.summary import Incident, LedgerSummary

START_NAMES = ("provision", "init", "reform", "restore", "detect")


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the loss, as shares of the rank-seconds of the world's slots."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """``goodput`` is 1 less the predicted shares of ``terms``; ``drift`` is measured less predicted goodput."""

    goodput: float
    drift: float
    terms: tuple[Term, ...]


def expected_cost_s(incident: Incident, world: int, spares: int, heartbeat_s: float) -> float:
    """Rank-seconds that a fault of this kind should cost a run of ``world`` ranks: 0 for what takes no rank out of training."""
    lost = len(incident.members)
    if not lost:
        return 0.0
    noticed_s = heartbeat_s if incident.kind == "hang" else 0.0
    seats = max(0, lost - spares)
    return (STALL_S + noticed_s) * world + REFILL_S * seats


def predict(summary: LedgerSummary, timeouts: Mapping[str, float] | None = None) -> Prediction:
    """The prediction for ``summary.now_s``. ``timeouts`` are the run's; a hang is noticed after ``heartbeat_s`` (default 3 s)."""
    heartbeat_s = float((timeouts or {}).get("heartbeat_s", 3.0))
    all_s, world, slots = max(summary.decided_s, 1e-9), summary.world, summary.world + summary.spares
    faults_s = sum(item.cost_s + item.init_s for item in summary.incidents if item.kind != "outage")
    start_share = max(0.0, sum(summary.categories[name] for name in START_NAMES) - faults_s) / all_s
    interval_s = summary.checkpoint_interval_s or 0.0
    saving = summary.checkpoint_blocked_s / interval_s if interval_s > 0 else 0.0
    expected_s = sum(expected_cost_s(item, world, summary.spares, heartbeat_s) for item in summary.incidents)
    rank_s = all_s * world / slots
    measured_s = faults_s + sum(item.cost["rework"] for item in summary.incidents if item.kind == "outage")
    terms = (
        Term("start-up", start_share, start_share),
        Term("checkpoints", (1.0 - start_share) * saving, summary.categories["checkpoint_stall"] / rank_s),
        Term("faults", expected_s / rank_s, measured_s / rank_s),
    )
    goodput = max(0.0, 1.0 - sum(term.predicted for term in terms))
    return Prediction(goodput, summary.goodput - goodput, terms)
