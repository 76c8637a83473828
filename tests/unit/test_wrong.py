"""What the page says is wrong: each thing when it is so, and nothing when all is well."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from dashboards.pages.state import run_state
from dashboards.pages.wrong import verdict, wrong
from fleet.ledger.goodput import Ledger
from fleet.ledger.report import build_report
from fleet.ledger.step_law import STEP_NAMES
from fleet.ledger.summary import LedgerSummary
from fleet.ledger.tallies import SlotStatus
from fleet.protocol.records import DecisionMade, Measurement, RunEnded
from fleet.protocol.types import StateId
from tests.golden.journals import Story, one_loss
from tests.unit.test_metrics import everything


def going_on(story: Story | None = None, now_s: float = 7.4, spares: int = 0) -> LedgerSummary:
    story = story or one_loss("f1")
    records = [record for record in story.records if not isinstance(record, RunEnded)]
    return dataclasses.replace(Ledger().apply_all(records).summary(now_s), spares=spares)


def test_a_run_that_trains_has_nothing_wrong_nor_has_one_that_completed() -> None:
    assert wrong(going_on(), []) == []
    assert wrong(Ledger().apply_all(one_loss("f1").records).summary(), []) == []


def test_a_run_that_starts_has_lost_no_rank() -> None:
    story = Story(world=2)
    assert wrong(going_on(story, 5.0), []) == []


def test_no_progress_is_told_as_the_alert_does() -> None:
    assert wrong(going_on(now_s=7.32 + 121.9), []) == []
    assert wrong(going_on(now_s=7.32 + 123), []) == ["No step was committed for 2 m 03 s."]


@pytest.mark.parametrize("silent", [True, False])
def test_ranks_and_spares_that_are_missing(silent: bool) -> None:
    story = Story(world=3, spares=1)
    story.view(1, [(0, 0)], 100)
    lines = wrong(going_on(story, 1.0, spares=1), [], silent=silent)
    if silent:
        assert lines == ["It has no end, and nobody writes its journal any more: its driver is gone."]
    else:
        assert lines == ["2 of 3 ranks do not train.", "No spare stands by: the next loss makes the world smaller."]


def test_faults_that_last_name_whom_they_strike() -> None:
    places = [SlotStatus(slot, 0, "trains", injected=("hang",) if slot < 6 else ("slow",)) for slot in range(7)]
    [line] = wrong(going_on(), places, injected=("store_gone",))
    assert line == "Struck now: hang (slots 0, 1, 2, 3 and 2 more), slow (slot 6), store_gone."


def test_an_overdue_checkpoint_and_none_at_all() -> None:
    story = everything()
    story.ends_us.clear()
    late = going_on(story, 4.0 + 3 * 60 + 1.2)
    assert [line for line in wrong(late, []) if "checkpoint" in line] == [
        "The newest durable checkpoint is old: 3 m 01 s, and one is due every 60.0 s."
    ]
    never = dataclasses.replace(late, tallies=dataclasses.replace(late.tallies, last_durable_s=None), checkpoint_latency_s=0.0)
    assert next(line for line in wrong(never, []) if "checkpoint" in line).startswith("No checkpoint is durable yet after")


def test_a_budget_that_ends_is_told_from_nine_tenths_on() -> None:
    summary = going_on(everything(), 38.0)
    assert summary.bill is not None
    spent = summary.bill["total"]["usd"]
    for budget, reported in ((spent / 0.89, False), (spent / 0.91, True)):
        lines = wrong(dataclasses.replace(summary, budget_usd=budget), [])
        assert any(line.startswith("91% of the budget") for line in lines) == reported
    assert not [line for line in wrong(dataclasses.replace(summary, tariff=None), []) if "budget" in line]


def test_results_that_are_wrong() -> None:
    story = one_loss()
    story.records[-1:] = [
        *(Measurement(None, StateId(0, 60), name, math.nan, at_s=7.33) for name in ("loss", "a", "b", "c", "d")),
        Measurement(None, StateId(0, 60), "accuracy", 0.5, at_s=7.33),
        DecisionMade("corruption", "go_back", "shard 3", None, 7.33),
    ]
    assert wrong(going_on(story), []) == [
        "Not finite: loss, a, b, c and 1 more.",
        "Wrong results were found, and acted on: 1 time.",
    ]
    broken = dataclasses.replace(going_on(), closes=False)
    assert wrong(broken, []) == ["The ledger does not close: its figures cannot be trusted."]


def test_a_run_that_failed_says_why() -> None:
    story = one_loss()
    story.records.pop()
    story.ended(7340, "failed")
    assert wrong(Ledger().apply_all(story.records).summary(), []) == ["It is failed: all steps are committed."]


def test_the_page_has_the_bill_its_budget_and_what_is_wrong() -> None:
    story = everything()
    report = build_report(story.records)
    state = run_state(report, [], "{}")
    bill, s = state["bill"], report.summary
    assert s.bill is not None and s.tariff is not None
    kept = sum(s.bill["categories"][name]["usd"] for name in STEP_NAMES)
    assert bill["lost"]["usd"] + kept + s.bill["pending"]["usd"] == pytest.approx(bill["total"]["usd"], abs=1e-6)
    left = 0.04 - bill["total"]["usd"]
    assert bill["budget"]["left_usd"] == pytest.approx(left, abs=1e-6)
    assert bill["budget"]["lasts_s"] == pytest.approx(left / (2 * s.tariff.per_s["usd"]), rel=1e-3), "two slots"
    assert bill["per_million_tokens"] and bill["per_step"]
    assert state["wrong"] == wrong(s, [])
    json.dumps(state, allow_nan=False)


# ---- is it well? -------------------------------------------------------------------------------------------------------------------------


def judged(s: LedgerSummary, *, silent: bool = False) -> tuple[str, str]:
    return verdict(s, wrong(s, [], silent=silent), silent=silent)


def test_a_run_that_starts_is_not_ill() -> None:
    assert judged(going_on(Story(world=2), 5.0)) == ("starting", "No step is committed yet, 5.0 s after the start.")


def test_a_run_that_does_not_come_to_its_first_step_is() -> None:
    state, why = judged(going_on(Story(world=2), 500.0))
    assert state == "degraded" and why.startswith("No step was committed for")


def test_a_run_that_trains_is_well_and_says_with_how_many() -> None:
    state, why = judged(going_on())
    assert state == "well" and why.startswith("2 of 2 ranks train, ")


def test_of_several_things_the_worst_is_the_reason() -> None:
    story = Story(world=3, spares=1)
    story.view(1, [(0, 0)], 100)
    assert judged(going_on(story, 1.0, spares=1)) == ("degraded", "2 of 3 ranks do not train. 1 more below.")


def test_a_run_that_has_ended_or_lost_its_driver_has_stopped() -> None:
    assert judged(Ledger().apply_all(one_loss("f1").records).summary()) == ("stopped", "It is completed: all steps are committed.")
    state, why = judged(going_on(), silent=True)
    assert state == "stopped" and "its driver is gone" in why
