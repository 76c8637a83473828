"""A rehearsal on one page: self-contained HTML with inline CSS and SVG, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

WIDTH, LEFT = 560.0, 40.0


@dataclass(frozen=True, slots=True)
class GoodputBar:
    """One goodput on the common axis, in pixels; ``low`` and ``high`` bound its interval."""

    name: str
    value: str
    remark: str
    at: float
    low: float
    high: float


def render_rehearsal(
    facts: Mapping[str, Any], rows: Sequence[tuple[str, str, str]], reasons: Sequence[str], spans: Sequence[tuple[float, float, float]]
) -> str:  # fmt: skip
    """The page. ``rows`` are (what, goodput, remark), ``spans`` the same as (value, low, high); ``facts`` is ``Rehearsal.to_dict``."""
    least = min(low for _, low, _ in spans)
    origin = max(0.0, least - 0.1 * (1.0 - least))
    bars = [GoodputBar(*row, *(_pixel(value, origin) for value in span)) for row, span in zip(rows, spans, strict=True)]
    ticks = [(_pixel(origin + (1 - origin) * n / 4, origin), f"{origin + (1 - origin) * n / 4:.0%}") for n in range(5)]
    folder = Path(__file__).parents[1] / "templates"
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("rehearsal.html").render(facts=facts, bars=bars, ticks=ticks, reasons=reasons, width=WIDTH)


def _pixel(share: float, origin: float) -> float:
    return round(LEFT + (WIDTH - 2 * LEFT) * (share - origin) / ((1 - origin) or 1.0), 1)
