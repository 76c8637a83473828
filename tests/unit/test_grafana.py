"""Grafana dashboards: built from the table, pushed as often as one likes, and never over what somebody changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_api.grafana_face import GrafanaFace
from typer.testing import CliRunner, Result

from dashboards.grafana import alerts, boards
from dashboards.grafana.panels import BOARDS, FOR_ALERTS, panels, shown_nowhere
from dashboards.grafana.parts import FIRST_SCREEN, Board
from dashboards.grafana.push import CREATED, LEFT_ALONE, NOT_OURS, OTHERS_RULES, UNCHANGED, UPDATED, connect, push
from dashboards.metrics.files import write_prometheus
from dashboards.metrics.rules import ALERTS, recordings
from dashboards.metrics.spec import MetricSpec
from dashboards.metrics.table import METRICS
from fleet.app.cli.main import app
from fleet.errors import ConfigError, RunFailed
from tests.support.fake_grafana import TOKEN, FakeGrafana
from tests.support.fake_grafana import grafana as serving
from tests.support.prometheus import promtool

PROMETHEUS = "http://127.0.0.1:9090"


@pytest.fixture
def there() -> Iterator[FakeGrafana]:
    with serving() as fake:
        yield fake


@pytest.fixture
def face(there: FakeGrafana) -> Iterator[GrafanaFace]:
    client = connect(there.url, TOKEN)
    yield client
    client.api.s.close()


def of_boards(face: GrafanaFace) -> dict[str, str]:
    """What becomes of each board when all is pushed."""
    done = push(face, PROMETHEUS)
    del done["Alerts"]
    return done


def results(face: GrafanaFace) -> set[str]:
    return set(of_boards(face).values())


def test_panels_ask_for_metrics_that_exist_and_say_what_they_answer() -> None:
    known = {spec.name for spec in METRICS} | set(recordings()) | {"ALERTS"}
    asked = set()
    for _, panel in panels():
        assert panel.question.endswith(("?", "."))
        for expr, _ in panel.queries:
            names = set(re.findall(r"fleet[_:][a-z_:0-9]+|ALERTS", re.sub(r"\{[^}]*\}", "", expr)))
            assert names
            assert names <= known, expr
            asked |= names
    unseen = {spec.name for spec in METRICS} - asked - FOR_ALERTS
    assert not unseen, f"no panel shows {unseen}"
    assert len({(board.uid, panel.title) for board, panel in panels()}) == len(panels())


def test_a_metric_that_nobody_drew_has_a_panel() -> None:
    spec = MetricSpec("fleet_tea_seconds", "Time for tea.", lambda summary: [], ("kind",))
    assert shown_nowhere(METRICS, BOARDS) == ()
    [panel] = shown_nowhere([*METRICS, spec], BOARDS)
    assert (panel.title, panel.question, panel.unit) == ("Tea seconds", "Time for tea.", "s")
    assert panel.queries == (('fleet_tea_seconds{run="$run"}', "{{kind}}"),)


def test_models_are_complete() -> None:
    for board, model in zip(BOARDS, boards.all_boards(), strict=True):
        assert boards.stamp_of(model) == boards.digest(model)
        assert [each["id"] for each in model["panels"]] == list(range(1, len(model["panels"]) + 1))
        names = [each["name"] for each in model["templating"]["list"]] if board.of_a_run else []
        assert names == ["run"] * board.of_a_run
        for panel in model["panels"]:
            for target in panel.get("targets", []):
                assert target["refId"]
                assert ("$run" in target["expr"]) == board.of_a_run
            if panel["type"] != "row":
                assert panel["datasource"]["uid"] == boards.SOURCE_UID
        assert "fleet_faults_total" in json.dumps(model["annotations"]) or not board.of_a_run


def places(board: Board, model: dict[str, Any]) -> dict[str, set[str]]:
    """Titles of the rows of a board that end within its first screen, with their panels."""
    found, row = dict[str, set[str]](), ""
    for panel in model["panels"]:
        place = panel["gridPos"]
        if panel["type"] == "row":
            row = panel["title"]
            assert row in board.rows
        elif place["y"] + place["h"] <= FIRST_SCREEN:
            found.setdefault(row, set()).add(panel["title"])
        assert place["x"] + place["w"] <= 24
    return {row: titles for row, titles in found.items() if len(titles) == len(board.rows[row])}


def test_the_first_screen_says_whether_it_is_well_what_it_costs_and_what_is_wrong() -> None:
    seen = {board.uid: places(board, model) for board, model in zip(BOARDS, boards.all_boards(), strict=True)}
    assert list(seen)[:3] == ["fleet-run", "fleet-overview", "fleet-cost"], "those that people look at come first"
    for uid in ("fleet-run", "fleet-overview"):
        assert list(seen[uid]) == ["Is it well?", "What does it cost?", "What is wrong?"]
    shown = set().union(*seen["fleet-run"].values())
    assert {"Goodput", "MFU", "Tokens a second", "USD", "USD lost", "kWh", "kg CO2", "Budget left", "Alerts"} <= shown
    assert {"In the last 15 minutes", "Ranks that do not train"} <= shown
    cost = set().union(*seen["fleet-cost"].values())
    assert {"USD", "Budget left", "USD for a million tokens", "USD for a kept step", "Scheduling", "x runtime", "x program (MFU)"} <= cost


def test_boards_that_people_look_at_are_small_and_lead_to_the_others() -> None:
    uids = {board.uid for board in BOARDS}
    for board, model in list(zip(BOARDS, boards.all_boards(), strict=True))[:3]:
        assert sum(map(len, board.rows.values())) <= 25
        assert [link["url"] for link in model["links"]] == [f"/d/{uid}" for uid in board.links]
        assert all(link["includeVars"] and link["keepTime"] for link in model["links"])
        assert uids >= {panel.opens for row in board.rows.values() for panel in row} - {""}
    assert {*BOARDS[0].links, BOARDS[0].uid} == uids, "from a run everything can be reached"


def test_a_number_is_red_when_it_is_bad() -> None:
    [model] = [model for model in boards.all_boards() if model["uid"] == "fleet-run"]
    steps = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"] for panel in model["panels"] if panel["type"] == "stat"
    }
    assert steps["Goodput"] == [{"value": None, "color": "red"}, {"value": 0.5, "color": "green"}]
    assert steps["Ranks that do not train"] == [{"value": None, "color": "green"}, {"value": 1.0, "color": "red"}]
    assert steps["Step"] == [{"value": None, "color": "text"}]


def test_a_push_creates_all_and_a_second_one_changes_nothing(there: FakeGrafana, face: GrafanaFace) -> None:
    assert results(face) == {CREATED}
    assert there.sources["Fleet Prometheus"]["url"] == PROMETHEUS
    assert set(there.dashboards) == {board.uid for board in BOARDS}
    before = there.writes
    assert results(face) == {UNCHANGED}
    assert there.writes == before


def test_the_alerts_are_pushed_as_rules_and_those_of_others_are_left_alone(
    there: FakeGrafana, face: GrafanaFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push(face, PROMETHEUS)["Alerts"] == CREATED
    group = there.rules[alerts.GROUP]
    assert [rule["title"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    assert {rule["data"][0]["datasourceUid"] for rule in group["rules"]} == {boards.SOURCE_UID}
    assert push(face, PROMETHEUS)["Alerts"] == UNCHANGED
    monkeypatch.setattr("dashboards.grafana.push.rule_group", lambda source: alerts.rule_group(source, "https://docs.example/run"))
    assert push(face, PROMETHEUS)["Alerts"] == UPDATED
    assert there.rules[alerts.GROUP]["rules"][0]["annotations"]["runbook_url"].startswith("https://docs.example/run#")
    del group["rules"][3:]
    there.rules[alerts.GROUP] = group
    assert push(face, PROMETHEUS)["Alerts"] == UPDATED, "some were deleted"
    there.rules[alerts.GROUP]["rules"].append({"title": "mine", "annotations": {}})
    assert push(face, PROMETHEUS)["Alerts"] == OTHERS_RULES
    assert there.rules[alerts.GROUP]["rules"][-1]["title"] == "mine"


def test_what_grafana_asks_needs_no_recorded_series(tmp_path: Path) -> None:
    """And holds for the same series: a rule of Prometheus with the same words is taken."""
    group = alerts.rule_group(boards.SOURCE_UID)
    exprs = {rule["title"]: rule["data"][0]["model"]["expr"] for rule in group["rules"]}
    assert not [name for name, expr in exprs.items() if "fleet:" in expr]
    content = {"groups": [{"name": "g", "rules": [{"alert": name, "expr": expr} for name, expr in exprs.items()]}]}
    (tmp_path / "rules.yml").write_text(json.dumps(content))
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


def changed(change: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Fleet's dashboards as another version of Fleet would build them."""
    models = boards.all_boards()
    for model in models:
        change(model)
        model["tags"] = [boards.TAG, boards.STAMP + boards.digest(model)]
    return models


def with_threshold(model: dict[str, Any]) -> None:
    defaults = model["panels"][1].setdefault("fieldConfig", {}).setdefault("defaults", {})
    defaults["thresholds"] = {"mode": "absolute", "steps": [{"value": None, "color": "green"}, {"value": 0.5, "color": "red"}]}


def other_refresh(model: dict[str, Any]) -> None:
    model["refresh"] = "1m"


def other_words(model: dict[str, Any]) -> None:
    model["title"] = "Mine"


def no_annotations(model: dict[str, Any]) -> None:
    model["annotations"] = {"list": []}


CHANGES = [with_threshold, other_refresh, other_words, no_annotations]


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_version_replaces_an_old_one_that_nobody_touched(
    change: Callable[[dict[str, Any]], None], there: FakeGrafana, face: GrafanaFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(face, PROMETHEUS)
    monkeypatch.setattr("dashboards.grafana.push.all_boards", lambda source: changed(change))
    assert results(face) == {UPDATED}
    assert {d["version"] for d in there.dashboards.values()} == {2}
    again = json.loads(json.dumps(there.dashboards["fleet-run"]))
    change(again)
    assert again == there.dashboards["fleet-run"]  # the change is in it
    assert results(face) == {UNCHANGED}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lists", [True, False])
def test_what_somebody_changed_is_left_alone(
    change: Callable[[dict[str, Any]], None], lists: bool, there: FakeGrafana, face: GrafanaFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.lists_versions = lists
    push(face, PROMETHEUS)
    there.edited("fleet-run", change)
    mine = json.dumps(there.dashboards["fleet-run"])
    assert push(face, PROMETHEUS)["Fleet: one run"] == LEFT_ALONE
    monkeypatch.setattr("dashboards.grafana.push.all_boards", lambda source: changed(other_refresh))
    done = of_boards(face)
    assert done.pop("Fleet: one run") == LEFT_ALONE
    assert set(done.values()) == {UPDATED}
    assert json.dumps(there.dashboards["fleet-run"]) == mine


def test_an_old_version_that_somebody_restored_is_left_alone(
    there: FakeGrafana, face: GrafanaFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(face, PROMETHEUS)
    first = json.loads(json.dumps(there.dashboards["fleet-run"]))
    monkeypatch.setattr("dashboards.grafana.push.all_boards", lambda source: changed(other_refresh))
    push(face, PROMETHEUS)
    there.edited("fleet-run", lambda model: model.update({**first, "version": model["version"]}), "Restored from version 1")
    assert push(face, PROMETHEUS)["Fleet: one run"] == LEFT_ALONE


def test_what_somebody_made_is_left_alone(there: FakeGrafana, face: GrafanaFace) -> None:
    there.edited("fleet-details", lambda model: model.update({"title": "mine", "tags": []}))
    done = of_boards(face)
    assert done.pop("Fleet: ranks, checkpoints, chaos") == NOT_OURS
    assert set(done.values()) == {CREATED}
    assert there.dashboards["fleet-details"]["title"] == "mine"


def test_a_source_and_a_folder_that_are_there_are_used(there: FakeGrafana, face: GrafanaFace) -> None:
    there.sources["Fleet Prometheus"] = {"id": 1, "uid": "mine", "url": "http://elsewhere.example"}
    there.folders["fleet"] = {"uid": "fleet", "title": "Renamed"}
    push(face, PROMETHEUS)
    assert there.sources["Fleet Prometheus"]["url"] == "http://elsewhere.example"
    assert there.folders["fleet"]["title"] == "Renamed"
    assert there.dashboards["fleet-run"]["panels"][1]["datasource"]["uid"] == "mine"


def test_one_that_is_made_or_saved_at_the_same_moment(there: FakeGrafana, face: GrafanaFace, monkeypatch: pytest.MonkeyPatch) -> None:
    there.fail = {"POST /api/datasources": 409, "POST /api/folders": 412}
    there.folders["x"] = {}
    with pytest.raises(RunFailed, match="dashboard fleet-run"):
        push(face, PROMETHEUS)  # the folder is not there: Grafana says 400
    there.fail = {}
    push(face, PROMETHEUS)
    monkeypatch.setattr("dashboards.grafana.push.all_boards", lambda source: changed(other_refresh))
    there.meddle = lambda: there.edited("fleet-run", other_words)
    with pytest.raises(RunFailed, match="at the same time"):
        push(face, PROMETHEUS)
    assert there.dashboards["fleet-run"]["title"] == "Mine"


@pytest.mark.parametrize(("status", "words"), [(401, "wrong or has run out"), (403, "Editor"), (500, "when it is well"), (503, "well")])
def test_a_refusal_says_what_to_do_and_a_later_push_finishes(there: FakeGrafana, face: GrafanaFace, status: int, words: str) -> None:
    there.fail = {"POST /api/dashboards": status}
    with pytest.raises(RunFailed, match=words):
        push(face, PROMETHEUS)
    there.fail = {}
    assert results(face) == {CREATED}


def test_a_grafana_that_keeps_no_versions_is_named(there: FakeGrafana, face: GrafanaFace) -> None:
    push(face, PROMETHEUS)
    there.fail = {"GET /api/dashboards/uid/fleet-overview/versions": 404}
    with pytest.raises(RunFailed, match="Grafana 9 or newer"):
        push(face, PROMETHEUS)


def test_a_wrong_token_or_no_grafana(there: FakeGrafana) -> None:
    client = connect(there.url, "wrong")
    with pytest.raises(RunFailed, match="GRAFANA_TOKEN"):
        push(client, PROMETHEUS)
    client.api.s.close()
    client = connect("http://127.0.0.1:9", TOKEN)
    with pytest.raises(RunFailed, match="cannot be reached"):
        push(client, PROMETHEUS)
    client.api.s.close()
    with pytest.raises(ConfigError, match="--grafana"):
        connect("grafana:3000", TOKEN)
    with pytest.raises(ConfigError, match="GRAFANA_TOKEN"):
        connect(there.url, "")


@pytest.mark.parametrize("login", ["page", "redirect"])
def test_a_page_to_log_in_is_no_grafana(there: FakeGrafana, face: GrafanaFace, login: str) -> None:
    there.login = login
    with pytest.raises(RunFailed, match="another program than Grafana answers") as refused:
        push(face, PROMETHEUS)
    assert "\n" not in str(refused.value) and "log in" in str(refused.value)
    there.login = ""
    assert results(face) == {CREATED}


def pushed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cluster", "dashboards", *arguments])


def test_the_command_pushes_with_the_token_of_the_environment(there: FakeGrafana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    first = pushed("--grafana", there.url, "--prometheus", "http://elsewhere.example")
    assert first.exit_code == 0, first.output
    assert first.output.splitlines() == [*(f"{board.title}: {CREATED}" for board in BOARDS), f"Alerts: {CREATED}"]
    assert there.sources["Fleet Prometheus"]["url"] == "http://elsewhere.example"
    assert set(there.dashboards) == {board.uid for board in BOARDS}
    again = pushed("--grafana", there.url)
    assert again.output.splitlines() == [*(f"{board.title}: {UNCHANGED}" for board in BOARDS), f"Alerts: {UNCHANGED}"]


@pytest.mark.parametrize(("token", "words"), [("", "is not set"), ("glsa_wrong", "is wrong or has run out")])
def test_the_command_refuses_without_a_token_that_holds(
    token: str, words: str, there: FakeGrafana, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", token)
    refused = pushed("--grafana", there.url)
    assert refused.exit_code != 0
    assert words in str(refused.exception)
    assert there.writes == 0


def links(folder: Path) -> set[str]:
    """Where the alerts of a rules file link to."""
    groups = yaml.safe_load((folder / "prometheus" / "fleet.rules.yml").read_text())["groups"]
    return {rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"] if "alert" in rule}


def test_alerts_link_to_the_runbook_that_is_asked_for(tmp_path: Path) -> None:
    write_prometheus(tmp_path / "prometheus", "127.0.0.1:8700", None, "https://docs.example/run")
    promtool("check", "config", str(tmp_path / "prometheus" / "prometheus.yml"))
    assert links(tmp_path) == {f"https://docs.example/run#{alert.anchor}" for alert in ALERTS}
    write_prometheus(tmp_path / "prometheus", "127.0.0.1:8700", None)
    assert links(tmp_path) == {f"docs/runbook.md#{alert.anchor}" for alert in ALERTS}
