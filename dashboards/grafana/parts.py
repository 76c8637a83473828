"""What boards are made of: a panel answers a question, a board is rows of panels."""

from __future__ import annotations

from dataclasses import dataclass, field

from dashboards.metrics.spec import MetricSpec

LINES, NUMBER, BARS = "timeseries", "stat", "bargauge"
SHARE, SECONDS, BYTES, COUNT = "percentunit", "s", "bytes", "short"
USD, KWH, KG = "currencyUSD", "kwatth", "masskg"
UNITS = {"seconds": SECONDS, "ratio": SHARE, "bytes": BYTES}
"""By the last word of a metric's name."""
RUN = 'run="$run"'
HEIGHTS = {NUMBER: 4}
HEIGHT = 8
"""Of a panel that is no number, in units of Grafana's grid."""
FIRST_SCREEN = 18
"""So many units are seen at once on a laptop."""
ABOVE, BELOW = "above", "below"


@dataclass(frozen=True, slots=True)
class Limit:
    """Bad, and red, is a value below ``at``, or one from there on: ``side``."""

    side: str
    at: float


@dataclass(frozen=True, slots=True)
class Panel:
    """``queries`` are (expression, legend); ``$run`` is the chosen run, ``$__rate_interval`` four scrapes or more. ``width`` of 24.

    ``height`` 0 is that of its kind. ``empty`` is shown where there is no series; whoever clicks on a series gets to the board ``opens``
    of that series' run.
    """

    title: str
    question: str
    queries: tuple[tuple[str, str], ...]
    unit: str = COUNT
    kind: str = LINES
    width: int = 12
    stacked: bool = False
    height: int = 0
    bad: Limit | None = None
    empty: str = ""
    opens: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. ``of_a_run``: it has a variable to choose the run, and marks its faults. ``links``: uids of boards to go to."""

    uid: str
    title: str
    rows: dict[str, tuple[Panel, ...]] = field(default_factory=dict)
    of_a_run: bool = True
    links: tuple[str, ...] = ()


def now(title: str, question: str, expr: str, unit: str = COUNT, *, bad: Limit | None = None, empty: str = "") -> Panel:
    """A number; six are a row."""
    return Panel(title, question, ((expr, ""),), unit, NUMBER, 4, bad=bad, empty=empty)


def lines(title: str, question: str, unit: str, *queries: tuple[str, str], stacked: bool = False) -> Panel:
    """Over time, half a row."""
    return Panel(title, question, queries, unit, stacked=stacked)


def bars(title: str, question: str, unit: str, *queries: tuple[str, str], width: int = 12, empty: str = "") -> Panel:
    """One bar for each series, as it is now."""
    return Panel(title, question, queries, unit, BARS, width, empty=empty)


def plain(spec: MetricSpec) -> Panel:
    """A metric over time, as it is."""
    words = spec.name.removeprefix("fleet_").removesuffix("_total").split("_")
    legend = " ".join(f"{{{{{label}}}}}" for label in spec.labels)
    return lines(" ".join(words).capitalize(), spec.help, UNITS.get(words[-1], COUNT), (f"{spec.name}{{{RUN}}}", legend))
