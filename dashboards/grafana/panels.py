"""Fleet's Grafana dashboards: three that people look at, and three for whoever looks for the reason. ``boards.py`` builds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from dashboards.grafana.details import CHAOS, CHECKPOINTS, RANKS
from dashboards.grafana.first import ALL_RUNS, COST, ONE_RUN
from dashboards.grafana.parts import Board, Panel, plain
from dashboards.metrics.spec import MetricSpec
from dashboards.metrics.table import METRICS

FOR_ALERTS = {"fleet_start_timestamp_seconds", "fleet_spares_wanted"}
"""Metrics that only alerts read."""


def shown_nowhere(specs: Iterable[MetricSpec], boards: Iterable[Board]) -> tuple[Panel, ...]:
    """A plain panel for each metric that none of ``boards`` asks for: who adds a metric need not draw it."""
    exprs = [expr for board in boards for row in board.rows.values() for panel in row for expr, _ in panel.queries]
    asked = set(re.findall(r"fleet_[a-z0-9_]+", " ".join(exprs))) | FOR_ALERTS
    return tuple(plain(spec) for spec in specs if spec.name not in asked)


def _complete(boards: tuple[Board, ...]) -> tuple[Board, ...]:
    """With the metrics that no panel was made for on the board of ranks, which nobody looks at first."""
    rest = shown_nowhere(METRICS, boards)
    return tuple(replace(board, rows={**board.rows, "Others": rest}) if rest and board is RANKS else board for board in boards)


BOARDS = _complete((ONE_RUN, ALL_RUNS, COST, RANKS, CHECKPOINTS, CHAOS))


def panels() -> list[tuple[Board, Panel]]:
    """Every panel of every dashboard."""
    return [(board, panel) for board in BOARDS for row in board.rows.values() for panel in row]
