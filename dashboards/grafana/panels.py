"""Fleet's Grafana dashboards: three that people look at, and one for whoever looks for the reason. ``boards.py`` builds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from dashboards.grafana.details import DETAILS
from dashboards.grafana.first import ALL_RUNS, COST, ONE_RUN
from dashboards.grafana.parts import Board, Panel, plain
from dashboards.metrics.spec import MetricSpec
from dashboards.metrics.table import METRICS

FOR_ALERTS = {"fleet_start_timestamp_seconds", "fleet_spares_wanted", "fleet_checkpoint_pending_timestamp_seconds"}
"""Metrics that only alerts read."""


def shown_nowhere(specs: Iterable[MetricSpec], boards: Iterable[Board]) -> tuple[Panel, ...]:
    """A plain panel for each metric that none of ``boards`` asks for: who adds a metric need not draw it."""
    exprs = [expr for board in boards for row in board.rows.values() for panel in row for expr, _ in panel.queries]
    asked = set(re.findall(r"fleet_[a-z0-9_]+", " ".join(exprs))) | FOR_ALERTS
    return tuple(plain(spec) for spec in specs if spec.name not in asked)


FIRST = (ONE_RUN, ALL_RUNS, COST)
BOARDS = (*FIRST, replace(DETAILS, rows={**DETAILS.rows, "All other metrics": shown_nowhere(METRICS, (*FIRST, DETAILS))}))


def panels() -> list[tuple[Board, Panel]]:
    """Every panel of every dashboard."""
    return [(board, panel) for board in BOARDS for row in board.rows.values() for panel in row]
