"""Metrics: what Prometheus reads is well formed, true, and never falls."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from dashboards.metrics.table import METRICS, RunsCollector
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.decisions import Interval, SettingTo
from fleet.protocol.fault_kinds import EXECUTABLE
from fleet.protocol.levels import PEERS
from fleet.protocol.records import (
    FLOPS,
    PEAK,
    TOKENS,
    VERSION,
    CheckpointRecord,
    DecisionMade,
    FaultRecord,
    Measurement,
    ProcessUp,
    RunEnded,
    RunStarted,
    Usage,
)
from fleet.protocol.types import Member, Process, StateId
from fleet.settings.run import RunSettings
from tests.golden.journals import Story, one_loss
from tests.support.doc_tables import metrics_table
from tests.support.prometheus import promtool

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(summary: LedgerSummary | None) -> Samples:
    return parse(generate_latest(registry_of(*([] if summary is None else [summary]))).decode())


def parse(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "run"))): sample.value
        for family in families
        for sample in family.samples
    }


def registry_of(*summaries: LedgerSummary) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RunsCollector(lambda: summaries))
    return registry


PRICES = {"usd_per_rank_hour": 2.0, "watts_per_rank": 700.0, "g_co2_per_kwh": 300.0, "budget_usd": 0.04, "usd_per_gb_month": 0.02}


def everything(began_unix_s: float = 1.7e9) -> Story:
    """A run with something of everything, that goes on; labels hold what text formats have to escape."""
    story = one_loss("f1")
    assert isinstance(story.records.pop(), RunEnded)
    settings = dataclasses.asdict(RunSettings(world=2)) | {"cost": PRICES}
    said = {"fault_rates": {"kill_rank": 0.01}, "settings": settings, "chaos": {"repair_s": None}}
    story.records[0] = RunStarted(VERSION, "story", 0.0, began_unix_s, 2, 0, 16, json.dumps(said))
    for slot, incarnation in ((0, 0), (1, 1)):
        story.spans(slot, incarnation, "c30000 K", generation=3, step=60)
    story.durable(30, 4_000)
    story.records += [
        ProcessUp(Member(0, 0), Process('node "a"\\\n', 100, 1), "t", 0.1),
        *(Measurement(None, StateId(0, 30), name, value, at_s=5.0) for name, value in ((TOKENS, 4096.0), (FLOPS, 3e9), (PEAK, 1e11))),
        Measurement(None, StateId(0, 30), 'loss "of" \\ all\nranks', math.nan, at_s=5.0),
        CheckpointRecord("copy-1", "durable", StateId(0, 30), 5.0, level=PEERS),
        DecisionMade("interval", "wait", "every 60 s", Interval(60.0), 5.0),
        DecisionMade(f"interval of {PEERS}", "wait", "every 6 s", Interval(6.0), 5.0),
        Usage(Member(0, 0), 500_000_000, 70_000_000, 12_000_000, at_s=5.0),
    ]
    return story


def eventful() -> tuple[LedgerSummary, LedgerSummary]:
    """Two runs with something of everything."""
    story = everything()
    story.ended(37_340)
    summary = Ledger().apply_all(story.records).summary()
    summary = dataclasses.replace(summary, tallies=dataclasses.replace(summary.tallies, pending_s=37.0))
    return summary, dataclasses.replace(summary, run="another", status="silent")


def rolled_back() -> Story:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    for step in range(1, 6):
        story.spans(0, 0, "c60 x40 K", step=step - 1)
        story.committed(step, 100 * step)
    story.durable(2, 500)
    story.lost(0, 0, 500)
    story.history(1, 2, 600)
    story.view(2, [(0, 1)], 600, 2, history=1, causes=("0.0",))
    for step in range(3, 6):
        story.spans(0, 1, "c60 x40 K", generation=2, history=1, step=step - 1, at=600)
        story.committed(step, 600 + 100 * (step - 2), 1)
    story.ended(900)
    return story


def test_values_are_the_ledgers() -> None:
    summary = Ledger().apply_all(one_loss(fault="f1").records).summary()
    samples = scrape(summary)
    assert samples["fleet_goodput_ratio", ()] == pytest.approx(summary.goodput)
    assert samples["fleet_rank_seconds_total", (("category", "compute"),)] == pytest.approx(6.0)
    assert samples["fleet_faults_total", (("kind", "kill_rank"), ("phase", "executed"))] == 1
    assert samples["fleet_fault_cost_rank_seconds", (("category", "provision"), ("component", "gpu"))] == pytest.approx(1.0)
    assert samples["fleet_run_info", (("status", "completed"),)] == 1
    assert samples["fleet_view_generation", ()] == 3


def test_no_counter_falls_across_a_rollback_and_the_sums_close() -> None:
    counters = {spec.name for spec in METRICS if spec.counts}
    ledger, last = Ledger(), Samples()
    for record in rolled_back().records:
        ledger.apply(record)
        summary = ledger.summary()
        samples = scrape(summary)
        assert all(samples[key] >= value for key, value in last.items() if key[0] in counters)
        decided = sum(value for (name, _), value in samples.items() if name == "fleet_rank_seconds_total")
        taken_back = sum(value for (name, _), value in samples.items() if name == "fleet_reclassified_rank_seconds_total")
        assert decided - taken_back + samples["fleet_pending_rank_seconds", ()] == pytest.approx(summary.rank_s, abs=1e-6)
        last = samples
    assert last["fleet_reclassified_rank_seconds_total", (("category", "compute"),)] == pytest.approx(0.18)
    assert last["fleet_steps_rolled_back_total", ()] == 3
    assert last["fleet_steps_committed_total", ()] == 8
    assert last["fleet_step", ()] == 5


def test_a_stop_is_in_no_figure_but_its_own() -> None:
    story = rolled_back()
    before = scrape(Ledger().apply_all(story.records).summary())
    story.resumed(3_600_900)
    after = scrape(Ledger().apply_all(story.records).summary())
    assert after["fleet_down_seconds", ()] == pytest.approx(3_600)
    changed = {name for (name, labels), value in after.items() if value != before.get((name, labels), 0.0)}
    assert changed == {"fleet_down_seconds", "fleet_run_info"}


def test_names_follow_the_rules() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    for spec in METRICS:
        assert spec.name.startswith("fleet_")
        assert spec.help.endswith(".")
        assert not set(spec.name.split("_")) & {"ms", "us", "minutes", "mb", "kb", "percent"}
        assert f"`{spec.name}`" in metrics_table()


def test_faults_are_counted_from_zero() -> None:
    records = one_loss("f1").records
    injected = next(number for number, record in enumerate(records) if isinstance(record, FaultRecord))
    executed = {("fleet_faults_total", (("kind", kind), ("phase", "executed"))) for kind in EXECUTABLE}
    before, after = (scrape(Ledger().apply_all(records[:end]).summary()) for end in (injected, injected + 1))
    assert {key: before[key] for key in executed} == dict.fromkeys(executed, 0.0)
    assert {key for key in executed if after[key] - before[key] == 1} == {
        ("fleet_faults_total", (("kind", "kill_rank"), ("phase", "executed")))
    }


def test_prometheus_and_openmetrics_read_the_same() -> None:
    registry = registry_of(*eventful())
    plain = list(text_string_to_metric_families(generate_latest(registry).decode()))
    strict = list(open_metrics(openmetrics.generate_latest(registry).decode()))
    known = {spec.name for spec in METRICS}
    assert {name for family in plain for name in (sample.name for sample in family.samples)} == known
    assert flat(plain) == flat(strict)
    assert {family.name + "_total" * (family.type == "counter") for family in strict} == known
    assert {family.documentation for family in strict} == {spec.help for spec in METRICS}


def flat(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], str]:
    """As text, since what is no number equals nothing."""
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"story", "another"}
    found = {(sample.name, frozenset(sample.labels.items())): repr(sample.value) for sample in samples}
    assert len(found) == len(samples)
    return found


def test_promtool_finds_no_fault_with_what_is_scraped() -> None:
    text = generate_latest(registry_of(*eventful())).decode()
    assert "FAIL" not in promtool("check", "metrics", given=text)
    with pytest.raises(AssertionError, match="counter metrics should have"):
        promtool("check", "metrics", given=text.replace("fleet_losses_total", "fleet_losses"))


def test_before_the_first_record_there_is_nothing_to_scrape() -> None:
    assert scrape(None) == {}


def test_a_measurement_that_is_not_a_number_is_scraped_as_such() -> None:
    story = one_loss()
    ledger = Ledger().apply_all(story.records[:2])
    ledger.measurements["loss"] = (1, math.nan)
    assert math.isnan(scrape(ledger.summary())["fleet_measurement", (("name", "loss"),)])


def test_the_number_of_series_does_not_grow_with_ranks_or_losses() -> None:
    story = Story(world=100)
    story.view(1, [(slot, 0) for slot in range(100)], 0)
    few = len(scrape(Ledger().apply_all(story.records).summary()))
    for slot in range(100):
        story.spans(slot, 0, "c60 x40 K")
        story.lost(slot, 0, 100 + slot)
    assert len(scrape(Ledger().apply_all(story.records).summary())) <= few + 7 + 9 + 3, (
        "a forecast of one kind and the factors come with the first step"
    )


def test_money_is_the_bills_and_follows_the_budget_that_is_set() -> None:
    story = everything()
    story.records.append(DecisionMade("settings", "set", "cost.budget_usd = 9", SettingTo("cost.budget_usd", 9.0), 38.0))
    for records, budget in ((story.records[:-1], 0.04), (story.records, 9.0)):
        summary = Ledger().apply_all(records).summary()
        samples, bill = scrape(summary), summary.bill
        assert bill is not None and summary.factors is not None
        names = {"usd": "fleet_spent_usd", "kwh": "fleet_spent_kwh", "kg_co2": "fleet_emitted_kg"}
        assert {unit: samples[name, ()] for unit, name in names.items()} == pytest.approx(bill["total"])
        of_faults = {"usd": "fleet_fault_cost_usd", "kwh": "fleet_fault_energy_kwh", "kg_co2": "fleet_fault_emissions_kg"}
        assert {unit: samples[name, (("kind", "kill_rank"),)] for unit, name in of_faults.items()} == pytest.approx(bill["faults"]["f1"])
        assert samples["fleet_budget_usd", ()] == budget
        assert samples["fleet_factor_ratio", (("factor", "program"),)] == pytest.approx(summary.factors.program)
        assert samples["fleet_factor_ratio", (("factor", "product"),)] == pytest.approx(summary.factors.product)
        assert samples["fleet_tokens_per_second", ()] == pytest.approx(4096.0 / summary.median_step_s)


def test_what_nobody_said_or_counted_has_no_series() -> None:
    samples = scrape(Ledger().apply_all(one_loss("f1").records).summary())
    unknown = {"spent_usd", "spent_kwh", "emitted_kg", "fault_cost_usd", "fault_energy_kwh", "fault_emissions_kg", "budget_usd"}
    assert not {name for name, _ in samples} & {f"fleet_{name}" for name in (*unknown, "tokens_per_second")}
    assert {labels for name, labels in samples if name == "fleet_factor_ratio"} == {
        (("factor", name),) for name in ("scheduling", "runtime", "product")
    }
