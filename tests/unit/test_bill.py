"""What a run costs: the parts add up, each amount says on what it rests, and nothing is guessed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dashboards.metrics.table import RunsCollector
from fleet.app.configuration import configured, layer_of
from fleet.app.ending import EndContext, ending
from fleet.errors import ConfigError
from fleet.ledger.bill import DATA_SHEET, DECLARED, Tariff, in_units, rests_on, tariff
from fleet.ledger.report import build_report
from fleet.protocol.records import Record, RunStarted
from fleet.settings.cost import CostSettings
from tests.golden.journals import one_loss

EXAMPLES = Path(__file__).parents[2] / "examples" / "cost"


def plain(**figures: Any) -> dict[str, Any]:
    return dataclasses.asdict(CostSettings(**figures))


def of(**figures: Any) -> Tariff:
    found = tariff(plain(**figures))
    assert found is not None
    return found


def test_a_slots_hour_costs_what_was_said_of_it() -> None:
    found = of(
        usd_per_rank_hour=2.0, usd_per_kwh=0.1, watts_per_rank=1000.0, pue=1.5, g_co2_per_kwh=400.0, embodied_g_co2_per_rank_hour=50.0
    )
    hour = found.of(3600.0)
    assert hour == pytest.approx({"usd": 2.0 + 1.5 * 0.1, "kwh": 1.5, "kg_co2": 1.5 * 0.4 + 0.05})
    assert set(found.basis.values()) == {DECLARED}
    assert in_units(hour) == "2.15 USD, 1.5 kWh, 0.65 kg CO2"


def test_watts_of_a_data_sheet_are_told_and_what_was_measured_wins() -> None:
    sheet = of(device="h100", g_co2_per_kwh=400.0, usd_per_rank_hour=2.0)
    assert sheet.of(3600.0)["kwh"] == pytest.approx(0.7)
    assert sheet.basis == {"usd": DECLARED, "kwh": DATA_SHEET, "kg_co2": DATA_SHEET}
    assert rests_on(sheet.basis) == "USD declared, kWh and kg CO2 data sheet"
    assert of(device="h100", watts_per_rank=500.0).of(3600.0)["kwh"] == pytest.approx(0.5)


def test_nothing_is_guessed() -> None:
    assert tariff(plain()) is None and tariff({}) is None
    assert set(of(usd_per_rank_hour=0.0).per_s) == {"usd"}
    assert set(of(embodied_g_co2_per_rank_hour=3.0).per_s) == {"kg_co2"}


@pytest.mark.parametrize(
    ("figures", "field"),
    [
        ({"usd_per_rank_hour": -1.0}, "cost.usd_per_rank_hour"),
        ({"watts_per_rank": float("nan")}, "cost.watts_per_rank"),
        ({"watts_per_rank": 1.0, "pue": 0.9}, "cost.pue"),
        ({"g_co2_per_kwh": 400.0}, "cost.g_co2_per_kwh"),
        ({"usd_per_kwh": 0.1}, "cost.usd_per_kwh"),
        ({"device": "abacus"}, "hardware"),
    ],
)
def test_what_cannot_be_is_refused_by_name(figures: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CostSettings(**figures)
    assert refused.value.field == field


def with_cost(**figures: Any) -> list[Record]:
    """The golden story, with a tariff."""
    records = list(one_loss().records)
    started = records[0]
    assert isinstance(started, RunStarted)
    config = json.loads(started.config or "{}")
    config["settings"] = {**config.get("settings", {}), "cost": plain(**figures)}
    return [dataclasses.replace(started, config=json.dumps(config)), *records[1:]]


def priced() -> dict[str, Any]:
    """Its report."""
    return build_report(with_cost(usd_per_rank_hour=36.0, watts_per_rank=3600.0, g_co2_per_kwh=500.0)).to_dict()


def test_categories_and_what_is_pending_add_up_to_the_run_and_each_fault_has_its_price() -> None:
    data = priced()
    found = data["bill"]
    slots_s = sum(data["categories"].values()) + data["pending_s"]
    assert found["total"] == pytest.approx({"usd": slots_s * 0.01, "kwh": slots_s * 0.001, "kg_co2": slots_s * 0.0005})
    for name, amount in found["total"].items():
        assert sum(each[name] for each in found["categories"].values()) + found["pending"][name] == pytest.approx(amount)
    [fault] = data["faults"]
    lost_s = sum(fault["cost"].values())
    assert found["faults"] == {fault["id"]: pytest.approx({"usd": lost_s * 0.01, "kwh": lost_s * 0.001, "kg_co2": lost_s * 0.0005})}
    assert found["per_million_tokens"] is None, "nobody counts them"
    assert found["per_step"]["usd"] == pytest.approx(found["total"]["usd"] / data["steps"])


def test_counters_have_what_is_settled_of_each_category_and_none_without_rates() -> None:
    def scraped(records: list[Record]) -> dict[str, float]:
        summary = build_report(records).summary
        registry = CollectorRegistry()
        registry.register(RunsCollector(lambda: [summary]))
        found = {sample.name: 0.0 for family in registry.collect() for sample in family.samples}
        for family in registry.collect():
            for sample in family.samples:
                found[sample.name] += sample.value
        return found

    priced_of = scraped(with_cost(usd_per_rank_hour=36.0))
    assert priced_of["fleet_cost_usd_total"] == pytest.approx(priced_of["fleet_rank_seconds_total"] * 0.01)
    assert "fleet_energy_kwh_total" not in priced_of and "fleet_cost_usd_total" not in scraped(list(one_loss().records))


def test_the_last_lines_say_what_it_cost_and_what_of_it_faults_took() -> None:
    data = priced()
    [words] = [words for head, words in ending(data, EndContext("story", "runs")) if head == "cost"]
    assert words == "0.147 USD, 0.0147 kWh, 0.00734 kg CO2 (declared); of it for faults 0.0154 USD, 0.00154 kWh, 0.00077 kg CO2"
    del data["bill"]
    assert "cost" not in [head for head, _ in ending(data, EndContext("story", "runs"))]


def test_a_run_pays_for_the_hours_that_it_took() -> None:
    """At noon less than at midnight, and over whole days the mean."""
    layers = [EXAMPLES / "spot.toml", EXAMPLES / "sunny.toml", "cost.watts_per_rank=1000", "cost.embodied_g_co2_per_rank_hour=0"]
    found = tariff(dataclasses.asdict(configured(*layers).run.cost))
    assert found is not None and set(found.per_s) == {"usd", "kwh", "kg_co2"}
    hour_s, day_s, kwh = 3600.0, 86400.0, 1.2
    midnight = 1_800_000_000 // 86400 * 86400.0

    def of_an_hour(unix_s: float, seconds: float) -> float:
        return found.between(unix_s, seconds).of(hour_s)["kg_co2"]

    assert of_an_hour(midnight + 12 * hour_s, hour_s) == pytest.approx(0.100 * kwh)
    assert of_an_hour(midnight + 23.5 * hour_s, hour_s) == pytest.approx(0.420 * kwh)
    assert of_an_hour(midnight + 7.5 * hour_s, hour_s) == pytest.approx((0.300 + 0.220) / 2 * kwh)
    assert of_an_hour(midnight + 5.25 * hour_s, 3 * day_s) == pytest.approx(found.of(hour_s)["kg_co2"])
    assert found.between(midnight, hour_s).of(hour_s)["kwh"] == found.of(hour_s)["kwh"]


def test_a_day_has_all_of_its_hours() -> None:
    with pytest.raises(ConfigError, match="24 finite numbers"):
        configured("cost.g_co2_per_kwh_by_hour=1,2")


def test_a_value_may_be_a_path(tmp_path: Path) -> None:
    """A file of settings is one that is there, or whose name looks like no ``key=value``."""
    assert layer_of("chaos.trace=some/faults.csv", tmp_path) == "chaos.trace=some/faults.csv"
    assert layer_of("folder/run.toml", tmp_path) == tmp_path / "folder" / "run.toml"
    (tmp_path / "a=b").touch()
    assert layer_of("a=b", tmp_path) == tmp_path / "a=b"


def test_what_the_demo_is_told_is_settings() -> None:
    assert configured(EXAMPLES.parent / "demo.toml").run.cost.usd_per_rank_hour == 0.05
