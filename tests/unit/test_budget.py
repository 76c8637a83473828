"""A run ends in order once its budget is spent, is told before, and what was told is known after a restart."""

from __future__ import annotations

import dataclasses

import pytest

from fleet.errors import ConfigError
from fleet.machine.budget import usd_per_s
from fleet.machine.core import FleetMachine
from fleet.protocol.events import SettingChanged, Tick
from fleet.protocol.instructions import EndRun, Write
from fleet.protocol.records import DecisionMade, Record, Resumed, RunStarted
from fleet.settings.cost import CostSettings
from fleet.settings.run import RunSettings
from tests.unit.test_live_settings import machine

A_USD_A_SECOND = 3600.0 / 2


def settings(budget_usd: float | None = 20.0) -> RunSettings:
    """Of two slots, which cost a USD a second together."""
    return RunSettings(world=2, cost=CostSettings(usd_per_rank_hour=A_USD_A_SECOND, budget_usd=budget_usd))


def said(one: FleetMachine, at_s: float) -> list[DecisionMade]:
    outs = one.handle(Tick(), at_s)
    return [out.record for out in outs if isinstance(out, Write) and isinstance(out.record, DecisionMade) and out.record.policy == "budget"]


def test_it_is_told_at_nine_tenths_once_and_the_run_ends_when_all_is_spent() -> None:
    one = machine(settings())
    assert not said(one, 17.9)
    [warning] = said(one, 18.1)
    assert warning.action == "warn" and warning.reason.startswith("18.1 of 20 USD are spent: it ends in 0.000528 h")
    assert not said(one, 19.9)
    outs = one.handle(Tick(), 20.1)
    [ended] = [out for out in outs if isinstance(out, EndRun)]
    assert ended.status == "stopped" and "cost.budget_usd is 20" in ended.reason


def test_a_budget_that_is_raised_in_time_is_told_of_anew() -> None:
    one = machine(settings())
    assert said(one, 18.1)
    one.handle(SettingChanged("cost.budget_usd", 40.0), 18.2)
    assert not said(one, 35.9)
    [warning] = said(one, 36.1)
    assert "36.1 of 40 USD" in warning.reason


def test_time_without_machines_is_not_paid_and_a_restarted_coordinator_does_not_tell_again() -> None:
    one = machine(settings())
    [warning] = said(one, 18.1)
    started = RunStarted(2, "run", 0.0, 0.0, 2, 0, 8, "{}")
    journal: list[Record] = [started, warning, dataclasses.replace(warning, policy="recovery", at_s=18.5)]
    again = machine(settings())
    again.replay(journal, 18.6)
    assert not said(again, 18.7)
    resumed = machine(settings())
    resumed.replay([*journal, Resumed(1000.5, 0.0, "its user", gap=True)], 1000.6)
    assert not said(resumed, 1001.0) and resumed.state.uptime.down_s == pytest.approx(982.0)
    assert said(resumed, 1002.5)[-1].action == "stop"
    elsewhere = machine(settings())
    elsewhere.resume([*journal, Resumed(1000.5, 0.0, "its user", gap=True)], 1000.5)
    assert elsewhere.state.uptime.down_s == pytest.approx(982.0), "in a new cluster, too"


def test_without_a_budget_nothing_is_said() -> None:
    assert not said(machine(settings(None)), 1e6)
    assert usd_per_s(CostSettings()) == 0.0


@pytest.mark.parametrize(
    "figures", [{"budget_usd": 5.0}, {"budget_usd": 0.0, "usd_per_rank_hour": 1.0}, {"budget_usd": 5.0, "watts_per_rank": 9.0}]
)
def test_a_budget_needs_a_price(figures: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        CostSettings(**figures)
    assert refused.value.field == "cost.budget_usd"
