"""One run on one page: self-contained HTML with inline CSS and SVG, no scripts, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from dashboards.pages.curves import STEPS, curves, fault_marks, thinned
from fleet.ledger.categories import MEANINGS
from fleet.ledger.report import Report, duration, forecast_words, losses_by_size, prediction_words, rank_time, worth_words
from fleet.ledger.step_law import STEP_NAMES
from fleet.ledger.summary import COST_NAMES, Incident, LedgerSummary
from fleet.ledger.timeline import STEP, Timeline
from fleet.ledger.utc import clock, stamp
from fleet.protocol.levels import STORE

WIDTH, ROW, LEFT = 1_000.0, 16, 44
MAX_SLOTS = 64
MAX_SEGMENTS = 10_000
MAX_MARKS = 300
MAX_INCIDENTS = 500
MAX_POINTED = 80
"""Places of a curve that can be pointed at."""

COLOURS = {
    STEP: "#0f9d78",
    "rework": "#d55e00",
    "detect": "#c777a9",
    "reform": "#e69f00",
    "provision": "#6a7279",
    "maintenance": "#004477",
    "group_wait": "#3000d8",
    "restore": "#56b4e9",
    "checkpoint_stall": "#0072b2",
    "init": "#f0e442",
    "verify": "#6958c9",
    "idle_spare": "#afafad",
    "finish": "#bedabe",
    "other": "#b20d3c",
    "pending": "#d1d7df",
}
"""After Okabe and Ito, with neutral ones for time in which nothing goes wrong. Colour-blind readers can tell each from every other one,
and from the page in light and dark: ``tests/unit/test_page.py`` simulates what they see."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of the page's pictures, in pixels, with the text it shows when pointed at."""

    x: float
    width: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot's bars; ``y`` is their upper edge."""

    slot: int
    y: float
    bars: list[Bar]


def render_html(report: Report) -> str:
    """The page of a run. Under 2 MB whatever its length: of many slots those that lost most are drawn, and short pieces are merged."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    summary, marks = report.summary, fault_marks(report)
    environment.filters |= {"duration": duration, "rank_time": rank_time, "utc": lambda at_s: clock(summary.unix_s(at_s))}
    incidents = happened(summary)
    rows = _rows(summary, report.timeline)
    shown = {bar.colour for row in rows for bar in row.bars}
    return environment.get_template("page.html").render(
        s=summary,
        headline=_headline(report),
        lasted=(stamp(summary.started_unix_s), stamp(summary.unix_s(summary.now_s))),
        waterfall=waterfall(summary),
        law=_law(summary),
        rows=rows,
        left_out=len(summary.slot_us) - len(rows),
        marks=_marks(summary, report.timeline, {row.slot: row.y for row in rows}),
        ticks=_ticks(summary),
        legend=[(name, colour) for name, colour in COLOURS.items() if colour in shown],
        layout={"width": WIDTH, "left": LEFT, "row": ROW, "height": max(ROW, ROW * len(rows))},
        incidents=sorted(incidents, key=lambda item: -item.cost_s)[:MAX_INCIDENTS],
        incident_count=len(incidents),
        cost_names=[name for name in COST_NAMES if any(item.cost[name] for item in summary.incidents)],
        curves=[_drawn(curve, marks) for curve in curves(report)],
        meanings=MEANINGS,
        interval=interval_decisions(report.history["decisions"]),
        checkpoints=_checkpoints(report.history["checkpoints"]),
        fault_counts=sorted(summary.faults_by_kind_phase.items()),
    )


def _headline(report: Report) -> list[tuple[str, str, str]]:
    """(figure, name, what it means)."""
    s = report.summary
    return [
        (f"{s.goodput:.2%}", "goodput", "committed, never rolled back steps, of the rank-seconds of the world"),
        (f"{s.scheduling_goodput:.2%}", "scheduling goodput", "the same, of all that was allocated, spares included"),
        (f"{s.ettr:.2%}", "ETTR", "wall time of committed steps, of all wall time"),
        *_predicted(report),
        (f"{s.steps:,}", "steps", f"committed; {s.rolled_back_total:,} were rolled back"),
        (duration(s.held_s), "wall time", f"{s.world} ranks, spares: {s.spares}{_down(s)}"),
        (f"{s.in_view_losses}", "ranks lost in training", f"{s.losses_total} processes lost in all, {s.views_total} views"),
    ]


def _down(s: LedgerSummary) -> str:
    return f"; stopped for {duration(s.down_s)} beside it" if s.down_s else ""


def _predicted(report: Report) -> list[tuple[str, str, str]]:
    s = report.summary
    if not s.training_s:
        return []
    ahead = [("", "forecast", line) for line in forecast_words(report)] + [("", "worth", line) for line in worth_words(s)]
    return [(f"{s.training_goodput:.2%}", "while training", f"between start-up and end; the goodput is {prediction_words(s)}"), *ahead]


def happened(s: LedgerSummary) -> list[Incident]:
    """What struck, or was kept from it; what is only planned is a secret of the page's owner."""
    return [item for item in s.incidents if not item.phases or item.phases[-1][0] not in ("planned", "aimed")]


def waterfall(s: LedgerSummary) -> list[dict[str, Any]]:
    """From what was allocated down to goodput; ``left`` is where a bar starts, in shares of what was allocated. Pending time is in none."""
    allocated, left = s.decided_s or 1.0, 1.0
    rows = [{"name": "allocated", "rank_s": allocated, "share": 1.0, "left": 0.0, "colour": COLOURS["provision"]}]
    for name, value in losses_by_size(s):
        left -= value / allocated
        rows.append({"name": name, "rank_s": value, "share": value / allocated, "left": max(0.0, left), "colour": COLOURS[name]})
    good = sum(s.categories[name] for name in STEP_NAMES)
    return [*rows, {"name": "goodput", "rank_s": good, "share": good / allocated, "left": 0.0, "colour": COLOURS[STEP]}]


def law_terms(s: LedgerSummary) -> list[tuple[str, float]]:
    """(term, seconds) of a step."""
    return list(zip(("compute", "exposed communication", "straggler wait", "data wait", "garbage collection"), s.law.parts_s, strict=True))


def _law(s: LedgerSummary) -> list[tuple[str, float, float]]:
    """(term, seconds, share of the step); what was hidden lies within what was computed, and is no part of their sum."""
    terms = law_terms(s)
    total = sum(value for _, value in terms) or 1.0
    hidden = [("hidden behind computing", s.step_law.hidden_s)] if s.step_law is not None and s.step_law.overlap_s is not None else []
    return [(name, value, 100 * value / total) for name, value in (*terms, *hidden)]


# ---- the timeline ------------------------------------------------------------------------------------------------------------------------


def _x(s: LedgerSummary, at_s: float) -> float:
    return LEFT + WIDTH * min(1.0, max(0.0, (at_s - s.started_s) / (s.wall_s or 1.0)))


def drawn_slots(s: LedgerSummary, timeline: Timeline, most: int, segments: int) -> tuple[list[int], int]:
    """Slots in order, and how many neighbouring pieces are drawn as one; of too many slots, those that lost the most time."""
    lost = [sum(value for name, value in slot.items() if name not in STEP_NAMES) for slot in s.slots]
    chosen = sorted(sorted(range(len(lost)), key=lambda slot: (-lost[slot], slot))[:most])
    together = 1
    while sum(len(timeline.segments(slot, together)) for slot in chosen) > segments:
        together *= 2
    return chosen, together


def _rows(s: LedgerSummary, timeline: Timeline) -> list[SlotRow]:
    chosen, together = drawn_slots(s, timeline, MAX_SLOTS, MAX_SEGMENTS)
    return [SlotRow(slot, ROW * number, _bars(s, timeline, slot, together)) for number, slot in enumerate(chosen)]


def _bars(s: LedgerSummary, timeline: Timeline, slot: int, together: int) -> list[Bar]:
    bars = []
    for segment in timeline.segments(slot, together):
        x = _x(s, segment.start_s)
        title = (
            f"slot {slot}: {segment.name} for {duration(segment.end_s - segment.start_s)} from {duration(segment.start_s - s.started_s)}"
        )
        bars.append(Bar(round(x, 2), round(max(_x(s, segment.end_s) - x, 0.6), 2), COLOURS[segment.name], title))
    return bars


def _marks(s: LedgerSummary, timeline: Timeline, rows: Mapping[int, float]) -> dict[str, Any]:
    """Losses lie on their slot, faults above all slots, views across all."""
    kinds: dict[str, list[dict[str, Any]]] = {"views": [], "faults": [], "losses": []}
    for mark in timeline.marks:
        place = {"x": round(_x(s, mark.at_s), 2), "title": f"{duration(mark.at_s - s.started_s)}: {mark.text}", "kind": mark.kind}
        if mark.kind == "loss" and mark.slot is not None and mark.slot in rows:
            kinds["losses"].append({**place, "y": rows[mark.slot]})
        elif mark.kind == "view":
            kinds["views"].append(place)
        elif mark.kind.startswith("fault-"):
            kinds["faults"].append(place)
    counts = {name: len(places) for name, places in kinds.items()}
    return {**{name: places[:MAX_MARKS] for name, places in kinds.items()}, "left_out": sum(max(0, n - MAX_MARKS) for n in counts.values())}


def _ticks(s: LedgerSummary) -> list[tuple[float, str]]:
    return [(round(LEFT + WIDTH * part / 5, 1), duration(s.wall_s * part / 5)) for part in range(6)]


# ---- figures of the model and the checkpoints ----------------------------------------------------------------------------------------


def _nice(low: float, high: float) -> list[float]:
    """Some four round numbers from about ``low`` to about ``high``, both of them included."""
    wanted = (high - low or abs(high) or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= wanted * 0.999)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _drawn(curve: Mapping[str, Any], marks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A curve of ``dashboards.pages.curves`` in pixels: lines, ticks, places to point at, and where faults struck."""
    over_steps, points = curve["x"] == STEPS, curve["points"]
    values = [value for point in points for value in point[2:] if value is not None]
    rows = _nice(min(values, default=0.0), max(values, default=0.0))
    first, last = points[0][0] if over_steps else 0.0, points[-1][0]

    def x(at: float) -> float:
        return round(LEFT + WIDTH * (at - first) / (last - first or 1.0), 1)

    def y(value: float) -> float:
        return round(8 + 120 * (rows[-1] - value) / (rows[-1] - rows[0] or 1.0), 1)

    columns = [at for at in _nice(first, last) if first <= at <= last]
    label = "step {:,.0f}".format if over_steps else duration
    pointed = thinned(points, MAX_POINTED)
    marked = [(mark[curve["x"]], mark["text"]) for mark in marks if mark[curve["x"]] is not None]
    return {
        "name": curve["name"],
        "unit": curve["unit"],
        "lines": [
            " ".join(f"{x(point[0])},{y(point[index])}" for point in points if point[index] is not None)
            for index in range(2, 2 + len(curve["series"]))
        ],
        "rows": [(y(value), f"{value:.6g}") for value in rows],
        "columns": [(x(at), label(at)) for at in columns],
        "pointed": [(x(before[0]), round(x(after[0]) - x(before[0]), 1), _said(curve, after)) for before, after in pairwise(pointed)],
        "marks": [(x(at), text) for at, text in marked if first <= at <= last],
    }


def _said(curve: Mapping[str, Any], point: Sequence[Any]) -> str:
    """What a point says to who points at it."""
    step, at_s = point[:2] if curve["x"] == STEPS else (point[1], point[0])
    values = [f"{name} {value:.6g}" for name, value in zip(curve["series"], point[2:], strict=True) if value is not None]
    return f"step {step or 0:,.0f}, {duration(at_s)}: {', '.join(values)}"


def interval_decisions(decisions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The newest decisions on the interval of either level, where the reason changed."""
    mine = [decision for decision in decisions if decision["policy"].startswith("interval")]
    changed = mine[:1] + [after for before, after in pairwise(mine) if before["reason"] != after["reason"]]
    return changed[-8:]


def _checkpoints(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    records = [record for record in records if record["level"] == STORE]
    durable = [record for record in records if record["phase"] == "durable"]
    failed = [record for record in records if record["phase"] == "failed"]
    means = {name: sum(record[name] for record in durable) / len(durable) if durable else None for name in ("blocked_s", "latency_s")}
    return {"durable": len(durable), "failed": len(failed), "newest": durable[-1] if durable else None, **means}
