"""The dashboards' queries against a real Prometheus, which scrapes a run while it is written by hand: no panel is without an answer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dashboards.grafana.panels import panels
from dashboards.metrics.rules import rules
from fleet.host.clock import unix_time_s
from fleet.protocol.records import FaultRecord
from tests.support.prometheus import Server, filled, quick, scraping
from tests.support.waiting import until
from tests.support.watching import watched
from tests.unit.test_metrics import everything

LASTED_S = 38.0
LIMIT_S = 30.0
"""A rate needs two scrapes, and a rule its turn."""


def unanswered(prometheus: Server, begun_s: float) -> list[str]:
    """Queries that had no answer since then."""
    asked = {f"{board.title}, {panel.title}: {expr}": filled(expr, "story") for board, panel in panels() for expr, _ in panel.queries}
    return [name for name, expr in asked.items() if not prometheus.history(expr, begun_s, unix_time_s())]


def test_every_panel_of_every_dashboard_has_an_answer_while_a_fault_strikes(tmp_path: Path) -> None:
    begun_s = unix_time_s()
    records = everything(begun_s - LASTED_S).records
    injected = next(number for number, record in enumerate(records) if isinstance(record, FaultRecord))
    with watched(tmp_path) as served:
        served.write("story", records[:injected])
        with scraping(tmp_path / "prometheus", [served.url.removeprefix("http://")], quick(rules(), 0.01)) as prometheus:
            prometheus.until('fleet_faults_total{run="story",kind="kill_rank"} == 0')
            served.write("story", records[injected:])
            prometheus.until('fleet_faults_total{run="story",kind="kill_rank"} == 1')
            with suppress(TimeoutError):
                until(lambda: not unanswered(prometheus, begun_s), "every panel has an answer", LIMIT_S, 1.0)
            assert not unanswered(prometheus, begun_s)
            [cost] = prometheus.query("fleet_spent_usd / on (run) (fleet_wall_seconds * 2 * 2 / 3600)")
            assert abs(float(cost["value"][1]) - 1.0) < 1e-6, "two slots, at 2 USD an hour"
