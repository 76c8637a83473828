"""What a run came to: one report from its journal, as JSON and as a table for the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.goodput import Ledger
from fleet.ledger_summary import COST_NAMES, STEP_NAMES, Incident, LedgerSummary
from fleet.ledger_timeline import Timeline
from fleet.records import CheckpointRecord, DecisionMade, Measurement, ProcessLost, Record, ViewPublished

BAR_WIDTH = 44
MAX_ROWS = 25
"""Faults in the terminal's table; the JSON and the page have all."""
GREEN, RED, BOLD, DIM, PLAIN = "\033[32m", "\033[31m", "\033[1m", "\033[2m", "\033[0m"
STATUS_COLOUR = {"completed": GREEN, "failed": RED}


@dataclass(frozen=True, slots=True)
class Report:
    """``summary`` and ``timeline`` are the ledger's own; ``history`` holds what happened, as plain data."""

    summary: LedgerSummary
    timeline: Timeline
    history: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, keys in a fixed order, seconds rounded to the nanosecond. What is not a finite number is None."""
        s = self.summary
        head = {
            "run": s.run,
            "status": s.status,
            "reason": s.reason,
            "digest": s.digest,
            "started_unix_s": s.started_unix_s,
            "wall_s": s.wall_s,
            "world": s.world,
            "spares": s.spares,
            "shards": s.shards,
            "steps": s.steps,
            "rolled_back_steps": s.rolled_back_total,
            "median_step_s": s.median_step_s,
            "goodput": s.goodput,
            "scheduling_goodput": s.scheduling_goodput,
            "ettr": s.ettr,
            "other_ratio": s.other_ratio,
            "closes": s.closes,
            "pending_s": s.pending_s,
            "holes": s.holes,
            "hole_s": s.hole_s,
            "stale_s": s.stale_s,
            "categories": s.categories,
            "law_per_step": dataclasses.asdict(s.law),
            "faults": [_incident(item) for item in s.incidents],
            "uncharged": {name: s.uncharged[name] for name in (*COST_NAMES, "init")},
        }
        plain = _plain({**head, **self.history, "counts": _counts(s)})
        assert isinstance(plain, dict)
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def build_report(records: Iterable[Record]) -> Report:
    """Fold a run's journal. Raises LedgerError when its rank-seconds overlap or leave a gap."""
    timeline = Timeline()
    ledger = Ledger(timeline)
    losses: list[dict[str, Any]] = []
    views: list[dict[str, Any]] = []
    checkpoints: list[dict[str, Any]] = []
    decisions: list[dict[str, Any]] = []
    measurements: dict[str, list[list[float]]] = {}
    for record in records:
        ledger.apply(record)
        match record:
            case ProcessLost():
                losses.append({**dataclasses.asdict(record), "member": str(record.member)})
            case ViewPublished():
                views.append(_view(record))
            case CheckpointRecord():
                checkpoints.append({**dataclasses.asdict(record), "state": [record.state.lineage, record.state.step]})
            case DecisionMade():
                decisions.append(dataclasses.asdict(record))
            case Measurement():
                measurements.setdefault(record.name, []).append([record.state.step, record.value])
    summary = ledger.summary()
    history = {"losses": losses, "views": views, "checkpoints": checkpoints, "decisions": decisions, "measurements": measurements}
    return Report(summary, ledger.closed_timeline() or timeline, history)


def _view(record: ViewPublished) -> dict[str, Any]:
    return {
        "generation": record.view.generation,
        "at_s": record.at_s,
        "size": len(record.view.members),
        "members": [str(member) for member in record.view.members],
        "state": [record.view.state.lineage, record.view.state.step],
        "checkpoint": record.view.checkpoint,
        "graceful": record.graceful,
        "causes": list(record.causes),
        "reason": record.reason,
    }


def _incident(item: Incident) -> dict[str, Any]:
    phases = [{"phase": phase, "at_s": at_s, "detail": detail} for phase, at_s, detail in item.phases]
    return {**dataclasses.asdict(item), "phases": phases, "cost_s": item.cost_s}


def _counts(summary: LedgerSummary) -> dict[str, Any]:
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, phase), count in sorted(summary.faults_by_kind_phase.items()):
        by_kind.setdefault(kind, {})[phase] = count
    total = {phase: sum(phases.get(phase, 0) for phases in by_kind.values()) for phase in ("planned", "executed", "suppressed", "healed")}
    return {
        "faults_by_kind": by_kind,
        **total,
        "losses": summary.losses_total,
        "in_view_losses": summary.in_view_losses,
        "views": summary.views_total,
        "checkpoints": dict(summary.checkpoints_by_phase),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# ---- the terminal ------------------------------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Three figures and a unit that fits, ``-`` for None: ``85 ms``, ``12.3 s``, ``4 m 05 s``, ``7 h 20 m``, ``3.2 d``."""
    if seconds is None:
        return "-"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 3_600:
        return f"{int(seconds // 60)} m {int(seconds % 60):02d} s"
    if seconds < 172_800:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} m"
    return f"{seconds / 86_400:.1f} d"


def rank_time(rank_s: float) -> str:
    """Rank-seconds, or rank-hours from 10,000 on."""
    return f"{rank_s:,.2f} s" if rank_s < 10_000 else f"{rank_s / 3600:,.1f} h"


def losses_by_size(summary: LedgerSummary) -> list[tuple[str, float]]:
    """Where the rank-seconds went that were no goodput, largest first; categories without any are left out."""
    named = [(name, value) for name, value in summary.categories.items() if name not in STEP_NAMES and value > 0]
    if summary.pending_s > 0:
        named.append(("pending", summary.pending_s))
    return sorted(named, key=lambda item: -item[1])


def render_table(report: Report, *, colour: bool = False) -> str:
    """The report as text of at most 110 columns: headline, waterfall, faults with their cost. ``colour`` adds ANSI codes."""
    paint = _Paint(colour)
    parts = [_headline(report.summary, paint), _waterfall(report.summary, paint), _step(report.summary), _faults(report.summary, paint)]
    return "\n".join([*(part for part in parts if part), _footer(report.summary, paint)]) + "\n"


class _Paint:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, code: str, text: str) -> str:
        return f"{code}{text}{PLAIN}" if self._colour else text


def _headline(s: LedgerSummary, paint: _Paint) -> str:
    state = f"{s.status}: {s.reason}" if s.reason else s.status
    spares = f" + {s.spares} spare{'s' if s.spares > 1 else ''}" if s.spares else ""
    back = f", {s.rolled_back_total:,} rolled back" if s.rolled_back_total else ""
    title = f"{paint(BOLD, s.run)}  {paint(STATUS_COLOUR.get(s.status, BOLD), state)}"
    ratios = f"scheduling {s.scheduling_goodput:.2%}   ETTR {s.ettr:.2%}"
    size = f"{s.steps:,} steps{back}   {s.world} ranks{spares} for {duration(s.wall_s)}"
    return f"{title}\n{paint(BOLD + GREEN, f'goodput {s.goodput:.2%}')}   {ratios}   {size}\n"


def _bar(begin: float, share: float, fill: str) -> str:
    """A bar from ``begin`` for ``share`` of the width; whatever is there at all gets one character."""
    start = min(round(begin * BAR_WIDTH), BAR_WIDTH - 1)
    return " " * start + fill * max(1, round((begin + share) * BAR_WIDTH) - start)


def _waterfall(s: LedgerSummary, paint: _Paint) -> str:
    allocated = s.rank_s or 1.0
    lines = [_line("allocated", allocated, 1.0, _bar(0.0, 1.0, "█"))]
    left = 1.0
    for name, value in losses_by_size(s):
        share = value / allocated
        left -= share
        lines.append(_line(f"- {name}", value, share, paint(RED, _bar(max(0.0, left), share, "▒"))))
    lines.append(
        _line("= goodput", sum(s.categories[name] for name in STEP_NAMES), s.scheduling_goodput, paint(GREEN, _bar(0.0, left, "█")))
    )
    return "\n".join([*lines, ""])


def _line(name: str, rank_s: float, share: float, bar: str) -> str:
    return f"  {name:<19}{rank_time(rank_s):>14} {share:>8.2%}  {bar}"


def _step(s: LedgerSummary) -> str:
    law = s.law
    terms = (("compute", law.compute_s), ("comm", law.comm_s), ("straggler", law.sync_s), ("data", law.data_s))
    return f"  a step of {duration(s.median_step_s)}: " + "  ".join(f"{name} {duration(value)}" for name, value in terms) + "\n"


def _faults(s: LedgerSummary, paint: _Paint) -> str:
    """Injected faults that came to something, and losses that no fault explains, dearest first."""
    items = sorted((item for item in s.incidents if item.cost_s > 0 or item.members), key=lambda item: -item.cost_s)
    if not items:
        return ""
    heads = ["fault", "at", "what", "lost", *COST_NAMES, "cost", "stall"]
    rows = [_row(item) for item in items[:MAX_ROWS]]
    lines = _columns([heads, *rows], left=(0, 2, 3))
    lines[0] = paint(DIM, lines[0])
    if len(items) > MAX_ROWS:
        rest = items[MAX_ROWS:]
        lines.append(f"  and {len(rest)} more, {rank_time(sum(item.cost_s for item in rest))} in all")
    return "\n".join([*lines, ""])


def _row(item: Incident) -> list[str]:
    members = ",".join(item.members[:2]) + (f",+{len(item.members) - 2}" if len(item.members) > 2 else "")
    what = item.kind if item.component == "unknown" else f"{item.kind} {item.component}"
    costs = [duration(item.cost[name]) if item.cost[name] else "-" for name in COST_NAMES]
    return [item.id[:18], duration(item.at_s), what[:24], members or "-", *costs, duration(item.cost_s), duration(item.stall_s)]


def _columns(rows: Sequence[Sequence[str]], left: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [
        [text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return ["  " + "  ".join(row).rstrip() for row in cells]


def _footer(s: LedgerSummary, paint: _Paint) -> str:
    total = sum(s.categories.values()) + s.pending_s
    verdict = paint(GREEN, "closes") if s.closes else paint(RED, "does not close")
    holes = f", {s.holes} holes of {duration(s.hole_s)}" if s.holes else ""
    holes += f", {duration(s.stale_s)} told by processes that were replaced" if s.stale_s else ""
    return f"  ledger {verdict}: {total:,.6f} of {s.rank_s:,.6f} rank-seconds, other {s.other_ratio:.2%}{holes}"
