"""A plan on one page: self-contained HTML with inline CSS and SVG, no scripts, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from fleet.laws.checkpointing import goodput
from fleet.planning.plan import FleetPlan, days, notes
from fleet.planning.sweep import Point
from fleet.planning.words import TIER_NAMES, sections, sweep_row

WIDTH, HEIGHT, LEFT, BELOW = 560.0, 190.0, 48.0, 26.0
PALETTE = ("#0f9d78", "#d55e00", "#0072b2", "#e69f00", "#c777a9", "#56b4e9", "#6958c9", "#6a7279", "#b20d3c")
"""Those of the ledger's page, which colour-blind readers can tell apart."""


@dataclass(frozen=True, slots=True)
class BarPiece:
    """A part of a bar, in percent of its width."""

    name: str
    share: str
    start: float
    width: float
    colour: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A line over a logarithmic axis; ``ticks`` are (pixel, label), ``mark`` is the point that was chosen."""

    title: str
    caption: str
    line: str
    low: str
    high: str
    ticks: list[tuple[float, str]]
    mark: tuple[float, float] | None


def render_plan(plan: FleetPlan, field: str, points: Sequence[Point]) -> str:
    """The page of a plan, with plots over the ``points`` of a sweep of ``field``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("plan.html").render(
        plan=plan,
        title=f"{plan.asked.model} on {plan.asked.gpus:,} {plan.asked.hardware}",
        headline=_headline(plan),
        bars=_bars(plan),
        charts=[*_sweep_charts(plan, field, points), *_interval_charts(plan)],
        sections=sections(plan),
        field=field,
        rows=[(sweep_row(point), point.refusal) for point in points],
        notes=notes(plan),
        layout={"width": WIDTH, "height": HEIGHT, "left": LEFT, "below": BELOW},
    )


def _headline(plan: FleetPlan) -> list[tuple[str, str, str]]:
    """(figure, name, what it means)."""
    bill = plan.bill
    return [
        (f"{plan.faults.goodput:.1%}", "goodput", "share of the wall clock that becomes steps which are kept"),
        (f"{plan.step.mfu:.1%}", "MFU", "share of the arithmetic peak that trains the model, without faults"),
        (days(plan.faults.mtbf_s), "between faults", f"{bill.faults:,.0f} in the run"),
        (f"{bill.days:,.1f}", "days", f"for {plan.asked.run_tokens / 1e12:g} T tokens"),
        (f"{bill.usd / 1e6:,.1f} M", "USD", f"{plan.faults.spares} spare nodes included"),
        (f"{bill.tons_co2:,.0f}", "t CO2", f"{bill.mwh:,.0f} MWh"),
    ]


def _bars(plan: FleetPlan) -> list[tuple[str, list[BarPiece]]]:
    lost = {"steps that are kept": plan.faults.goodput, **plan.faults.losses}
    return [("Where a step goes", _pieces(plan.step.shares)), ("Where the wall clock goes", _pieces(lost))]


def _pieces(shares: Mapping[str, float]) -> list[BarPiece]:
    found, start = list[BarPiece](), 0.0
    for number, (name, share) in enumerate(each for each in shares.items() if each[1] > 0):
        found.append(BarPiece(name, f"{share:.2%}", 100 * start, 100 * share, PALETTE[min(number, len(PALETTE) - 1)]))
        start += share
    return found


def _sweep_charts(plan: FleetPlan, field: str, points: Sequence[Point]) -> list[Chart]:
    good = [point for point in points if point.plan and isinstance(point.value, (int, float)) and point.value > 0]
    if len(good) < 2:
        return []
    values = [float(point.value) for point in good]
    mine = float(getattr(plan.asked, field))
    plans = [point.plan for point in good if point.plan]
    return [
        _chart(f"Goodput over {field}", "percent", values, [100 * each.faults.goodput for each in plans], mine),
        _chart(f"Kept tokens per second over {field}", "millions", values, [each.kept_tokens_per_s / 1e6 for each in plans], mine),
    ]


def _interval_charts(plan: FleetPlan) -> list[Chart]:
    """Goodput of each checkpoint tier for intervals around the chosen one."""
    charts = []
    for tier in (each for each in plan.faults.tiers if each.blocked_s > 0):
        intervals = [tier.interval_s * 2.0 ** (power / 4) for power in range(-16, 17)]
        shares = [100 * goodput(interval, tier.blocked_s, tier.mtbf_s, tier.down_s, tier.restart_s) for interval in intervals]
        title = f"Checkpoint interval, {TIER_NAMES[tier.name]}"
        caption = f"percent of the wall clock that this tier keeps, over seconds of work between copies; chosen: {days(tier.interval_s)}"
        charts.append(_chart(title, caption, intervals, shares, tier.interval_s))
    return charts


def _chart(title: str, caption: str, xs: Sequence[float], ys: Sequence[float], chosen: float) -> Chart:
    low, high = min(ys), max(ys)
    first, last, span = math.log(xs[0]), math.log(xs[-1]), (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log(x) - first) / ((last - first) or 1.0)
        return round(LEFT + (WIDTH - LEFT - 12) * along, 1), round(8 + (HEIGHT - 16) * (high - y) / span, 1)

    nearest = min(range(len(xs)), key=lambda i: abs(math.log(xs[i] / chosen))) if chosen > 0 else None
    stride = max(1, (len(xs) - 1) // 6)
    return Chart(
        title, caption, " ".join(f"{px},{py}" for px, py in map(place, xs, ys)), f"{low:.4g}", f"{high:.4g}",
        [(place(x, low)[0], f"{x:,.0f}" if x >= 10 else f"{x:.3g}") for x in xs[::stride]],
        None if nearest is None else place(xs[nearest], ys[nearest]),
    )  # fmt: skip
