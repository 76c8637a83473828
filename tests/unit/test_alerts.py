"""Every alert fires when it should, is back to normal afterwards, and keeps silent in between: simulated journals, through the ledger and
the collector, into Prometheus's own rule tester. ``python -m tests.unit.test_docs`` writes the table of the documentation."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards.feeds import SILENT
from dashboards.grafana.alerts import rule_group
from dashboards.grafana.boards import all_boards
from dashboards.metrics.rules import ALERTS, recordings, rules
from dashboards.metrics.table import METRICS, RunsCollector
from fleet.host.follow import SILENT_S
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import LedgerSummary
from fleet.protocol import records as r
from fleet.protocol.decisions import Interval
from fleet.protocol.types import Member, Process, StateId
from tests.golden.journals import Story
from tests.support.prometheus import promtool, quick
from tests.tidy import documents

EVERY_S = 15
TARGET = 'up{job="fleet"}'
ROOT = Path(__file__).parents[2]
MINUTE = 60.0


class Hours(Story):
    """A story told by the minute: steps take ten seconds, times are in seconds, and the run starts at the epoch.

    From the first to the second moment of ``gone_s`` nobody writes its journal; of ``unseen_s`` the page is not to be found, or, where
    ``down``, does not answer.
    """

    def __init__(self, world: int = 2, spares: int = 0) -> None:
        super().__init__(world, spares)
        self.records[0] = r.RunStarted(r.VERSION, "story", 0.0, 0.0, world, spares, 16, "{}")
        self.step = 0
        self.places = [(slot, 0) for slot in range(world)]
        self.gone_s = self.unseen_s = (math.inf, math.inf)
        self.down = False
        for slot in range(world + spares):
            self.records.append(r.ProcessUp(Member(slot, 0), Process("node", 100 + slot, 1), "t", 0.0))
        self.view(1, self.places, 0.0)
        self.generation = 1

    def train(self, from_s: float, to_s: float, step: str = "c6000 x4000 K", idle: tuple[int, ...] = (), history: int = 0) -> None:
        """Whole steps of ten seconds by everybody in the view; ``idle`` slots stand by."""
        for at_s in range(round(from_s), round(to_s), 10):
            for slot, incarnation in self.places:
                self.spans(slot, incarnation, step, generation=self.generation, history=history, step=self.step, at=1000.0 * at_s)
            for slot in idle:
                self.spans(slot, 0, "s10000", generation=-1, at=1000.0 * at_s)
            self.step += 1
            self.committed(self.step, 1000.0 * (at_s + 10), history)

    def form(self, places: list[tuple[int, int]], at_s: float, *causes: str) -> None:
        self.generation, self.places = self.generation + 1, places
        self.view(self.generation, places, 1000.0 * at_s, self.step, causes=causes)

    def up(self, slot: int, incarnation: int, at_s: float) -> None:
        self.records.append(r.ProcessUp(Member(slot, incarnation), Process("node", 200 + incarnation, 1), "t", at_s))


def steady() -> Hours:
    story = Hours()
    story.train(0, 45 * MINUTE)
    return story


def burning(until_s: float) -> Hours:
    """Both ranks spend their time on starting again, from minute 10 on."""
    story = Hours()
    story.train(0, 600)
    for slot in (0, 1):
        story.lost(slot, 0, 600_000.0)
    for at_s in range(600, round(until_s), 60):
        for slot in (0, 1):
            story.spans(slot, 1, "i60000", generation=-1, at=1000.0 * at_s)
    story.form([(0, 1), (1, 1)], until_s, "0.0", "1.0")
    story.train(until_s, until_s + 90 * MINUTE)
    return story


def hanging() -> Hours:
    story = Hours()
    story.train(0, 600)
    for slot in (0, 1):
        story.spans(slot, 0, "x900000", step=story.step)
    story.form([(0, 0), (1, 0)], 1500)
    story.train(1500, 40 * MINUTE)
    return story


def killed() -> Hours:
    """Its driver is killed at minute 10, and somebody resumes it at minute 120."""
    story, again_s = Hours(), 120 * MINUTE
    story.train(0, 600)
    story.gone_s = 600 + SILENT_S, again_s
    story.resumed(1000.0 * again_s)
    for slot in (0, 1):
        story.up(slot, 1, again_s)
    story.form([(0, 1), (1, 1)], again_s, "outage-1")
    story.train(again_s, again_s + 10 * MINUTE)
    return story


def crashing() -> Hours:
    story = Hours()
    story.train(0, 600)
    story.lost(1, 0, 600_000.0)
    story.form([(0, 0)], 600, "1.0")
    for incarnation, at_s in enumerate(range(660, 900, 60), start=1):
        story.up(1, incarnation, at_s)
        story.lost(1, incarnation, 1000.0 * at_s + 30_000, generation=-1)
    story.train(600, 45 * MINUTE)
    return story


def without_spares() -> Hours:
    story = Hours(world=1, spares=1)
    story.train(0, 600, idle=(1,))
    story.lost(1, 0, 600_000.0, generation=-1)
    story.train(600, 1200)
    story.up(1, 1, 1200)
    story.train(1200, 30 * MINUTE)
    return story


def checkpoints(durable: range, failed: range, again: range) -> Hours:
    story = Hours()
    story.records.append(r.DecisionMade("interval", "wait", "every 60 s", Interval(60.0), 0.0))
    for minute in range(60):
        if minute in durable or minute in again:
            story.durable(story.step, MINUTE * 1000 * minute)
        if minute in failed:
            story.records.append(r.CheckpointRecord(f"request-{minute}", "failed", StateId(0, story.step), MINUTE * minute, detail="503"))
        story.train(MINUTE * minute, MINUTE * (minute + 1))
    return story


def stuck() -> Hours:
    """A checkpoint of minute 10 is written for 30 minutes; those before took a second."""
    story = Hours()
    for minute in range(60):
        if minute < 10 or minute > 40:
            story.durable(story.step, MINUTE * 1000 * minute)
        if minute in (10, 40):
            phase = "requested" if minute == 10 else "durable"
            story.records.append(r.CheckpointRecord("late", phase, StateId(0, 60), MINUTE * minute, latency_s=1.0))
        story.train(MINUTE * minute, MINUTE * (minute + 1))
    return story


def in_vain() -> Hours:
    """Every three minutes from minute 10 to 40 all are lost, and go on from step 60; then they stay."""
    story = Hours()
    story.train(0, 600)
    for number, at_s in enumerate(range(600, 2400, 180), start=1):
        for slot in (0, 1):
            story.lost(slot, number - 1, 1000.0 * at_s, generation=story.generation)
            story.up(slot, number, at_s + 20)
        story.step = 60
        story.history(number, 60, 1000.0 * at_s)
        story.form([(0, number), (1, number)], at_s + 30, f"0.{number - 1}", f"1.{number - 1}")
        story.train(at_s + 30, at_s + 180 if at_s < 2220 else 65 * MINUTE, history=number)
    return story


def vanished(down: bool = False) -> Hours:
    """From minute 20 to 25 Prometheus does not see its page, and the run goes on."""
    story = steady()
    story.unseen_s, story.down = (20 * MINUTE, 25 * MINUTE), down
    return story


def corrupted() -> Hours:
    story = Hours()
    story.train(0, 600)
    story.records.append(r.DecisionMade("corruption", "evict", "1.0 differs from the majority", None, 600.0))
    story.train(600, 40 * MINUTE)
    return story


def drifting() -> Hours:
    """One loss costs four minutes of everybody's time, and the run outgrows it."""
    story = Hours()
    story.train(0, 600)
    story.lost(1, 0, 600_000.0)
    story.up(1, 1, 601)
    story.form([(0, 0), (1, 1)], 602, "1.0")
    for at_s in range(600, 840, 60):
        story.spans(0, 0, "f60000", generation=2, step=story.step)
        story.spans(1, 1, "r60000", generation=2, step=story.step, at=1000.0 * at_s)
    story.train(840, 65 * MINUTE)
    return story


def straggling() -> Hours:
    story = Hours()
    story.train(0, 600)
    story.train(600, 1800, "c3000 w6000 x1000 K")
    story.train(1800, 45 * MINUTE)
    return story


SCENES: dict[str, tuple[Callable[[], Hours], float, float, float]] = {
    "FleetGoodputBurnsFast": (lambda: burning(45 * MINUTE), 5, 44, 60),
    "FleetGoodputBurnsSlowly": (lambda: burning(60 * MINUTE), 5, 50, 140),
    "FleetNoProgress": (hanging, 9, 20, 35),
    "FleetCrashLoop": (crashing, 9, 16, 40),
    "FleetSparesExhausted": (without_spares, 9, 15, 25),
    "FleetCheckpointOverdue": (lambda: checkpoints(range(10), range(0), range(25, 60)), 9, 20, 30),
    "FleetStoreFailing": (lambda: checkpoints(range(10), range(10, 30), range(45, 60)), 9, 30, 50),
    "FleetCorruption": (corrupted, 9, 12, 30),
    "FleetCheckpointStuck": (stuck, 19, 30, 45),
    "FleetRestartsInVain": (in_vain, 12, 35, 60),
    "FleetTargetVanished": (vanished, 19, 24, 30),
    "FleetPredictionError": (drifting, 9, 22, 60),
    "FleetStragglerPersists": (straggling, 9, 25, 44),
}
"""Alert -> what happens, and at which minutes it is silent, fires, and is silent again."""


def _at_s(record: Any) -> float:
    return (record.start_us + sum(record.durations_us)) / 1e6 if isinstance(record, r.Spans) else float(record.at_s)


def reported(story: Hours, ledger: Ledger, at_s: float) -> LedgerSummary:
    """What a scrape is told, as ``dashboards.feeds`` does it."""
    if not story.gone_s[0] <= at_s < story.gone_s[1]:
        return ledger.summary(at_s)
    return dataclasses.replace(ledger.summary(), status=SILENT)


def series(story: Hours, until_s: float) -> list[dict[str, str]]:
    """What scrapes every 15 s would have seen of the run, as promtool's input. Series of a page that is gone become stale."""
    ledger, ahead = Ledger(), list(reversed(story.records))
    seen: dict[str, list[str]] = {TARGET: []}
    for number, at_s in enumerate(range(0, round(until_s) + 1, EVERY_S)):
        while ahead and _at_s(ahead[-1]) <= at_s:
            ledger.apply(ahead.pop())
        if story.unseen_s[0] <= at_s < story.unseen_s[1]:
            for name, values in seen.items():
                values += ["_"] * (number - len(values)) + ["0" if story.down and name == TARGET else "stale"]
            continue
        seen[TARGET].append("1")
        summary = reported(story, ledger, at_s)
        for family in RunsCollector(lambda summary=summary: [summary], per_rank=False).collect():
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                values = seen.setdefault(f"{sample.name}{{{labels}}}", [])
                values += ["_"] * (number - len(values)) + [repr(float(sample.value))]
    return [{"series": name, "values": " ".join(values)} for name, values in seen.items()]


def check(alert: str, minute: float, firing: int) -> dict[str, Any]:
    expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    return {"expr": expr, "eval_time": f"{minute:g}m", "exp_samples": [{"labels": "{}", "value": firing}]}


def scene(alert: str) -> dict[str, Any]:
    describe, *minutes = SCENES[alert]
    checks = [check(alert, minute, value) for minute, value in zip(minutes, (0, 1, 0), strict=True)]
    return {"interval": f"{EVERY_S}s", "input_series": series(describe(), MINUTE * minutes[-1]), "promql_expr_test": checks, "name": alert}


def judged(folder: Path, tests: list[dict[str, Any]], content: dict[str, Any] | None = None) -> None:
    (folder / "rules.yml").write_text(json.dumps(content or rules()))
    content = {"rule_files": ["rules.yml"], "evaluation_interval": f"{EVERY_S}s", "tests": tests}
    (folder / "tests.yml").write_text(json.dumps(content))
    promtool("test", "rules", str(folder / "tests.yml"))


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    for content in (rules(), quick(rules(), 0.01)):
        (tmp_path / "rules.yml").write_text(json.dumps(content))
        assert f"{len(ALERTS) + len(recordings())} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


@pytest.mark.parametrize("alert", [alert.name for alert in ALERTS])
def test_it_fires_when_it_should_and_is_back_to_normal(alert: str, tmp_path: Path) -> None:
    judged(tmp_path, [scene(alert)])


def test_a_page_that_does_not_answer_alarms_as_one_that_is_gone(tmp_path: Path) -> None:
    checks = [check("FleetTargetVanished", minute, firing) for minute, firing in {19: 0, 20: 0, 22: 1, 24: 1, 30: 0}.items()]
    judged(tmp_path, [{"interval": f"{EVERY_S}s", "input_series": series(vanished(down=True), 30 * MINUTE), "promql_expr_test": checks}])


def test_a_run_that_ended_is_not_missed(tmp_path: Path) -> None:
    """Its page may go with it."""
    story = steady()
    story.ended(45_000 * MINUTE)
    story.unseen_s = (46 * MINUTE, math.inf)
    checks = [check("FleetTargetVanished", minute, 0) for minute in (44, 47, 50, 60)]
    judged(tmp_path, [{"interval": f"{EVERY_S}s", "input_series": series(story, 60 * MINUTE), "promql_expr_test": checks}])


def test_what_grafana_asks_fires_as_the_rules_do(tmp_path: Path) -> None:
    """Two whose series have values of any size, of which one is made of recorded series, and one without a run."""
    asked = [
        {"alert": rule["title"], "expr": f"({rule['data'][0]['model']['expr']}) > 0", "for": rule["for"]}
        for rule in rule_group("prometheus")["rules"]
    ]
    scenes = [scene(alert) for alert in ("FleetGoodputBurnsFast", "FleetSparesExhausted", "FleetTargetVanished")]
    judged(tmp_path, scenes, {"groups": [{"name": "g", "rules": asked}]})


def test_a_run_whose_driver_was_killed_alarms_until_it_is_resumed(tmp_path: Path) -> None:
    minutes = {9: 0, 12: 0, 16: 1, 60: 1, 119: 1, 122: 0, 129: 0}
    checks = [check("FleetNoProgress", minute, firing) for minute, firing in minutes.items()]
    silent = {"expr": 'fleet_run_info{status="running"} or fleet_run_info', "eval_time": "60m"}
    silent |= {"exp_samples": [{"labels": 'fleet_run_info{run="story",status="silent"}', "value": 1}]}
    known = series(killed(), 130 * MINUTE)
    judged(tmp_path, [{"interval": f"{EVERY_S}s", "input_series": known, "promql_expr_test": [*checks, silent]}])


def test_the_first_fault_of_a_kind_is_an_annotation(tmp_path: Path) -> None:
    """As Grafana asks for it, with its variables filled in."""
    story = Hours()
    story.train(0, 600)
    story.fault("f1", "hang", "executed", 600_000.0)
    story.train(600, 1200)
    [board] = [board for board in all_boards() if board["uid"] == "fleet-run"]
    [said] = [each for each in board["annotations"]["list"] if each["name"] == "faults"]
    expr = said["expr"].replace("$run", "story").replace("$__interval", "1m")
    checks = [{"expr": expr, "eval_time": "9m", "exp_samples": []}]
    checks += [{"expr": f"({expr}) > bool 0", "eval_time": "10m30s", "exp_samples": [{"labels": '{kind="hang"}', "value": 1}]}]
    judged(tmp_path, [{"interval": f"{EVERY_S}s", "input_series": series(story, 20 * MINUTE), "promql_expr_test": checks}])


def test_a_steady_run_alarms_nobody(tmp_path: Path) -> None:
    silence = {"expr": "count(ALERTS) or vector(0)", "exp_samples": [{"labels": "{}", "value": 0}]}
    checks = [silence | {"eval_time": f"{minute}m"} for minute in (1, 5, 20, 44)]
    goodput = {"expr": "fleet:goodput:ratio_rate5m", "eval_time": "40m"}
    goodput |= {"exp_samples": [{"labels": 'fleet:goodput:ratio_rate5m{run="story"}', "value": 1}]}
    scenes = {"interval": f"{EVERY_S}s", "input_series": series(steady(), 45 * MINUTE), "promql_expr_test": [*checks, goodput]}
    judged(tmp_path, [scenes])


def test_rules_ask_only_for_metrics_that_exist() -> None:
    text = json.dumps(rules())
    known = {spec.name for spec in METRICS}
    asked = set(re.findall(r"fleet_[a-z_]+", text))
    assert asked <= known
    assert len(asked) > 8


def test_every_alert_has_its_section_in_the_runbook() -> None:
    anchors = documents.anchors((ROOT / "docs" / "runbook.md").read_text())
    links = {rule["annotations"]["runbook_url"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    assert {link.removeprefix("docs/runbook.md#") for link in links} <= set(anchors)
    headings = [line.removeprefix("## ") for line in (ROOT / "docs" / "runbook.md").read_text().splitlines() if line.startswith("## ")]
    assert [alert.name for alert in ALERTS] == headings[: len(ALERTS)]
