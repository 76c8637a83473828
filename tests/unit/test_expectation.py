"""What is expected of a run before it starts, beside what it came to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from chaos.settings import ChaosSettings
from fleet.app.plans import RunPlan, describe
from fleet.app.report import build_report, render_table
from fleet.ledger.expectation import (
    LEAST_S,
    LEAST_STEPS,
    REFILL_S,
    RESTART_S,
    SAVING,
    STALL_S,
    Expectation,
    Terms,
    expected_goodput,
    interval,
)
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.records import FaultRecord, RunStarted
from fleet.protocol.types import Fault
from fleet.settings.run import RecoverySettings, RunSettings, VerifySettings
from tests.golden.journals import Story

KILL = Fault("k", 10.0, "gpu", "kill_rank", slot=1)


def test_what_a_fault_costs_follows_from_its_kind_and_the_policy() -> None:
    world4, quiet = RunSettings(world=4), 1 - SAVING - 0.01
    assert expected_goodput((), world4, 100.0, None) == pytest.approx(quiet), "checkpoints, and the comparison of replicas"
    assert expected_goodput((), RunSettings(world=4, verify=VerifySettings(replicas=0.0)), 100.0, None) == pytest.approx(1 - SAVING)
    assert expected_goodput((KILL,), world4, 100.0, None) == pytest.approx(quiet - (4 * STALL_S + REFILL_S) / 400)
    assert expected_goodput((KILL,), RunSettings(world=4, spares=1), 100.0, None) == pytest.approx(quiet - STALL_S / 100)
    restarting = RunSettings(world=4, recovery=RecoverySettings(policy="restart"))
    assert expected_goodput((KILL,), restarting, 100.0, None) == pytest.approx(quiet - RESTART_S / 100)
    slow = Fault("s", 90.0, "slow_compute", "slow", slot=1, duration_s=40.0, severity=2.0)
    assert expected_goodput((slow,), world4, 100.0, None) == pytest.approx(quiet - 0.5 * 10 / 100), "only what falls into the run"
    assert expected_goodput((Fault("x", 1.0, "rack", "rack", node=1),), world4, 100.0, None) == pytest.approx(quiet)
    assert expected_goodput((KILL,) * 500, world4, 100.0, None) == 0.0


def plan(folder: Path) -> RunPlan:
    chaos = ChaosSettings(mtbf_s=20.0, kinds=("kill_rank",), duration_s=200.0)
    return RunPlan(name="r", folder=folder, settings=RunSettings(world=2, nodes=1), train=print, chaos=chaos)


def story(config: str, seconds: int, *, planned_s: tuple[float, ...] = ()) -> Story:
    """8 s of start-up, then ``seconds`` of steps; each planned fault that strikes takes all ranks out of it for a second."""
    told = Story(world=2)
    assert isinstance(told.records[0], RunStarted)
    told.records[0] = dataclasses.replace(told.records[0], config=config)
    for number, at_s in enumerate(planned_s):
        told.records.append(FaultRecord(Fault(f"f{number}", at_s, "gpu", "kill_rank", slot=1), "planned", 0.0, (), ""))
    told.view(1, [(0, 0), (1, 0)], 7_900)
    lost = [int(at_s) for at_s in planned_s if at_s < seconds]
    for slot in (0, 1):
        told.spans(slot, 0, "i4900", generation=-1, at=3_000)
        told.spans(slot, 0, "f100 " + " ".join("c1000 A" if second in lost else "c1000 K" for second in range(seconds)) + " e500")
    told.committed(seconds - len(lost), 8_000 + 1000 * seconds)
    told.ended(8_500 + 1000 * seconds)
    return told


def summary_of(told: Story) -> LedgerSummary:
    return Ledger().apply_all(told.records).summary()


def test_it_is_written_down_when_the_run_starts_and_stands_in_its_report(tmp_path: Path) -> None:
    config = describe(plan(tmp_path))
    terms = Terms.said(json.loads(config))
    assert terms == Terms.of(RunSettings(world=2, nodes=1), ChaosSettings().repair_s)
    told = story(config, 100, planned_s=(20.0, 60.0, 150.0))
    summary = summary_of(told)
    assert summary.training_goodput == pytest.approx(0.98)
    assert summary.expected_goodput == json.loads(config)["expected_goodput"]
    due = 2 * (2 * STALL_S + REFILL_S) / 200
    expected = summary.expectation
    assert expected is not None and expected.goodput == pytest.approx(0.98 - due), "of the faults that were due by then"
    assert summary.goodput_drift == pytest.approx(0.98 - expected.goodput)
    text = render_table(build_report(told.records))
    assert f"while training 98.00%, expected {expected.goodput:.2%}, drift +{100 * due:.1f} points" in text
    assert f"(95% interval of the expectation: {expected.low:.0%} to {expected.high:.0%}), within it" in text


def test_a_run_without_faults_drifts_by_nothing_to_speak_of(tmp_path: Path) -> None:
    """8 s of start-up are no part of it, however short the run is; and of a short one nothing is expected."""
    config = describe(dataclasses.replace(plan(tmp_path), chaos=ChaosSettings()))
    short, long = summary_of(story(config, 2)), summary_of(story(config, 60))
    assert (short.training_goodput, short.goodput_drift, short.expectation) == (1.0, None, None)
    told = render_table(build_report(story(config, 2).records))
    assert "while training 100.00%\n" in told and "drift" not in told
    assert long.goodput_drift == pytest.approx(SAVING + 0.01)
    assert long.expectation is not None and long.expectation.place(long.training_goodput) == "within"


def test_it_is_known_while_the_run_goes_on(tmp_path: Path) -> None:
    told = story(describe(plan(tmp_path)), 100)
    going_on = Ledger().apply_all(told.records[:-1])
    assert going_on.summary().expectation is not None
    assert going_on.summary(8.0 + 130.0).training_goodput > 0.99, "what ranks have yet to tell is not lost"


def test_of_a_run_that_was_stopped_nothing_is_expected(tmp_path: Path) -> None:
    told = story(describe(plan(tmp_path)), 100)
    told.resumed(200_000)
    told.ended(201_000)
    assert summary_of(told).goodput_drift is None


def test_a_cost_beyond_all_that_was_expected_shows() -> None:
    expected = Terms.of(RunSettings(world=2, nodes=1), None).expectation((KILL,), 100.0, 1_000)
    assert expected is not None and expected.low < expected.goodput < expected.high
    assert [expected.place(share) for share in (0.3, expected.goodput, 1.01)] == ["below", "within", "above"]


@pytest.mark.parametrize(("training_s", "steps"), [(LEAST_S - 1, LEAST_STEPS), (LEAST_S, LEAST_STEPS - 1)])
def test_a_short_training_is_expected_nothing_of(training_s: float, steps: int) -> None:
    terms = Terms.of(RunSettings(), None)
    assert terms.expectation((), training_s, steps) is None
    assert isinstance(terms.expectation((), LEAST_S, LEAST_STEPS), Expectation)


@pytest.mark.parametrize("config", ["{}", "no JSON", '{"expected_goodput": 0.9}', '{"expected_goodput": 0.9, "settings": 1, "chaos": []}'])
def test_a_journal_that_says_too_little_has_no_drift(config: str) -> None:
    summary = summary_of(story(config, 60))
    assert summary.expectation is None and summary.goodput_drift is None


def test_what_costs_nothing_has_no_interval() -> None:
    assert interval([]) == interval([0.0]) == (0.0, 0.0)
