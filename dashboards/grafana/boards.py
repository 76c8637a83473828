"""Fleet's dashboards as Grafana has them: built by the official builders, and stamped, so that a copy of another version is known."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableSort,
)

from dashboards.grafana.panels import BOARDS
from dashboards.grafana.parts import ABOVE, BARS, HEIGHT, HEIGHTS, LINES, NUMBER, RUN, Board, Limit, Panel

SOURCE_UID = "fleet-prometheus"
FOLDER_UID, FOLDER_TITLE = "fleet", "Fleet"
STAMP = "fleet-"
"""Tag of a dashboard: this and the digest of what was pushed."""
STAMP_DIGITS = 12
TAG = "fleet"


def _source(uid: str) -> DataSourceRef:
    return DataSourceRef(type_val="prometheus", uid=uid)


def _panel(panel: Panel, source: str) -> Any:
    kinds = {NUMBER: stat.Panel, BARS: bargauge.Panel}
    built: Any = kinds.get(panel.kind, timeseries.Panel)()
    built.title(panel.title).description(panel.question).unit(panel.unit).datasource(_source(source))
    built.span(panel.width).height(panel.height or HEIGHTS.get(panel.kind, HEIGHT))
    if panel.kind != LINES:
        built.thresholds(_thresholds(panel.bad)).color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    if panel.empty:
        built.no_value(panel.empty)
    if panel.opens:
        built.data_links([dashboard.DashboardLink("open the run").url(f"/d/{panel.opens}?var-run=${{__field.labels.run}}")])
    if panel.stacked:
        built.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(60)
    for number, (expr, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expr).legend_format(legend or "__auto").ref_id(chr(ord("A") + number))
        built.with_target(query.instant() if panel.kind == BARS else query.range())
    return built


def _thresholds(bad: Limit | None) -> Any:
    """Without a limit nothing is coloured."""
    if bad is None:
        steps = [Threshold(value=None, color="text")]
    else:
        low, high = ("green", "red") if bad.side == ABOVE else ("red", "green")
        steps = [Threshold(value=None, color=low), Threshold(value=bad.at, color=high)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _link(uid: str) -> Any:
    """To another board, of the same run and the same time."""
    [title] = [board.title for board in BOARDS if board.uid == uid]
    link = dashboard.DashboardLink(title.removeprefix("Fleet: ")).type(DashboardLinkType.LINK).url(f"/d/{uid}")
    return link.include_vars(True).keep_time(True)


def _annotation(source: str) -> Any:
    expr = f'sum by (kind) (increase(fleet_faults_total{{{RUN},phase="executed"}}[$__interval])) > 0'
    return dashboard.AnnotationQuery().name("faults").datasource(_source(source)).enable(True).icon_color("red").expr(expr)


def build(board: Board, source: str = SOURCE_UID) -> dict[str, Any]:
    """A dashboard as Grafana's JSON model. ``source``: uid of the Prometheus data source."""
    built = dashboard.Dashboard(board.title).uid(board.uid).refresh("5s").time("now-30m", "now").readonly().editable()
    if board.of_a_run:
        choice = dashboard.QueryVariable("run").label("run").query("label_values(fleet_run_info, run)").datasource(_source(source))
        built.with_variable(choice.refresh(dashboard_refresh()).sort(VariableSort.ALPHABETICAL_ASC)).annotation(_annotation(source))
    for uid in board.links:
        built.link(_link(uid))
    for title, row in board.rows.items():
        built.with_row(dashboard.Row(title))
        for panel in row:
            built.with_panel(_panel(panel, source))
    model: dict[str, Any] = _without_nothing(json.loads(JSONEncoder(sort_keys=True).encode(built.build())))
    for number, panel_model in enumerate(model["panels"], start=1):
        panel_model["id"] = number
    model["tags"] = [TAG]
    model["tags"].append(STAMP + digest(model))
    return model


def dashboard_refresh() -> Any:
    """The list of runs is asked for whenever the time range changes."""
    from grafana_foundation_sdk.models.dashboard import VariableRefresh

    return VariableRefresh.ON_TIME_RANGE_CHANGED


def _without_nothing(value: Any) -> Any:
    """But for the lowest step of thresholds, whose value is null in Grafana, too."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None or (key == "value" and "color" in value)}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


def digest(model: dict[str, Any]) -> str:
    """SHA-256, shortened, of all that a dashboard is built of, but for the stamp itself."""
    tags = [tag for tag in model.get("tags", []) if not tag.startswith(STAMP)]
    content = json.dumps({**model, "tags": tags}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:STAMP_DIGITS]


def stamp_of(model: dict[str, Any]) -> str | None:
    """The digest that a dashboard was pushed with; None when Fleet did not push it."""
    return next((tag.removeprefix(STAMP) for tag in model.get("tags", []) if tag.startswith(STAMP)), None)


def all_boards(source: str = SOURCE_UID) -> list[dict[str, Any]]:
    """Every dashboard, built."""
    return [build(board, source) for board in BOARDS]
