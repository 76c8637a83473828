"""What is expected of a run before it starts, beside what it came to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from chaos.settings import ChaosSettings
from fleet.config import RunSettings
from fleet.expectation import REFILL_S, RESTART_S, STALL_S, expected_goodput
from fleet.goodput import Ledger
from fleet.plans import RunPlan, describe
from fleet.records import RunStarted
from fleet.report import build_report, render_table
from fleet.types import Fault
from tests.golden.journals import one_loss

KILL = Fault("k", 10.0, "gpu", "kill_rank", slot=1)


def test_what_a_fault_costs_follows_from_its_kind_and_the_policy() -> None:
    world4 = RunSettings(world=4)
    assert expected_goodput((), world4, 100.0, None) == 1.0
    assert expected_goodput((KILL,), world4, 100.0, None) == pytest.approx(1 - (4 * STALL_S + REFILL_S) / 400)
    assert expected_goodput((KILL,), RunSettings(world=4, spares=1), 100.0, None) == pytest.approx(1 - STALL_S / 100)
    assert expected_goodput((KILL,), RunSettings(world=4, recovery="restart"), 100.0, None) == pytest.approx(1 - RESTART_S / 100)
    slow = Fault("s", 90.0, "slow_compute", "slow", slot=1, duration_s=40.0, severity=2.0)
    assert expected_goodput((slow,), world4, 100.0, None) == pytest.approx(1 - 0.5 * 10 / 100), "only what falls into the run"
    assert expected_goodput((Fault("x", 1.0, "rack", "rack", node=1),), world4, 100.0, None) == 1.0
    assert expected_goodput((KILL,) * 500, world4, 100.0, None) == 0.0


def test_it_is_written_down_when_the_run_starts_and_stands_in_its_report(tmp_path: Path) -> None:
    chaos = ChaosSettings(mtbf_s=20.0, kinds=("kill_rank",), duration_s=200.0)
    plan = RunPlan(name="r", folder=tmp_path, settings=RunSettings(world=2, nodes=1), train=print, chaos=chaos)
    expected = json.loads(describe(plan))["expected_goodput"]
    assert 0.5 < expected < 1
    story = one_loss("gpu-1")
    assert isinstance(story.records[0], RunStarted)
    story.records[0] = dataclasses.replace(story.records[0], config=describe(plan))
    summary = Ledger().apply_all(story.records).summary()
    again_s, ends_s = 0.8, summary.categories["finish"] + summary.categories["idle_spare"]
    assert summary.training_goodput == pytest.approx(10.0 / (summary.rank_s - (summary.categories["init"] - again_s) - ends_s))
    assert summary.goodput_drift == pytest.approx(summary.training_goodput - expected)
    assert f"expected {expected:.2%}" in render_table(build_report(story.records))


def test_a_journal_that_expects_nothing_has_no_drift() -> None:
    summary = Ledger().apply_all(one_loss().records).summary()
    assert summary.expected_goodput is None and summary.goodput_drift is None
