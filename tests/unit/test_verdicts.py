"""What the report tells of slow ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.app.report import render_table
from fleet.ledger.report import build_report
from fleet.protocol import records as r
from fleet.protocol.decisions import Prices, StepFigures, Suspect
from fleet.protocol.types import StateId
from tests.golden.journals import Story

SLOW = Suspect(1.0, 0.0, 0.5, 0.999, 40.0, 60.0, "compute", {"robust_z": 9.0})
STEPS = StepFigures(0.01, 0.0, 0.2, 0.2, 0.1, 0.12)
PRICES = Prices({"tolerate": 40.0, "rebalance": 16.0, "evict": 47.0}, slowdown=2.0, steps=STEPS)


def story(*, cleared_s: float | None = None) -> Story:
    """Two ranks; rank 1 is found slow at 12 s, gets fewer shards, and 100 steps are committed in the 13 s after that."""
    reported = Story(world=2)
    reported.view(1, [(0, 0), (1, 0)], 0)
    for slot in (0, 1):
        reported.spans(slot, 0, "c25000")
    reported.committed(60, 12_000)
    reported.records.append(r.DecisionMade("straggler", "accuse", "rank 1.0: compute takes 2.00 times", SLOW, 12.0))
    reported.records.append(r.DecisionMade("straggler", "rebalance", "it costs less", PRICES, 12.0))
    for count in range(101):
        if cleared_s is not None and 12.0 + 0.13 * count >= cleared_s and reported.records[-1].__class__ is r.Committed:
            reported.records.append(r.DecisionMade("straggler", "clear", "rank 1.0: well", SLOW, 12.0 + 0.13 * count))
            cleared_s = None
        reported.records.append(r.Committed(StateId(0, 61 + count), 12.0 + 0.13 * count))
    reported.ended(25_000)
    return reported


def test_an_action_is_told_with_its_alternatives_and_what_it_saved() -> None:
    report = build_report(story().records)
    reported = report.to_dict()["stragglers"]
    [case], [action] = reported["verdicts"], reported["actions"]
    assert (case["rank"], case["score"], case["evidence"]) == ("1.0", 0.5, {"robust_z": 9.0})
    assert action["costs_rank_s"] == {"tolerate": 40.0, "rebalance": 16.0, "evict": 47.0}
    assert action["steps"] == 100
    assert action["saved_rank_s"] == pytest.approx(2 * (100 * 0.2 - 13.0))
    text = render_table(report)
    assert "rank 1.0: compute takes 2.00 times" in text and "expected loss: rebalance 16.00 s, tolerate 40.00 s, evict 47.00 s" in text
    assert "saved 14.00 s" in text and max(map(len, text.splitlines())) <= 120


def test_nothing_is_saved_once_the_rank_is_well() -> None:
    [action] = build_report(story(cleared_s=18.0).records).to_dict()["stragglers"]["actions"]
    assert 40 <= action["steps"] <= 50


def test_what_is_cleared_is_one_kind_of_one_rank() -> None:
    reported = story()
    data = replace(SLOW, kind="data")
    reported.records.insert(-1, r.DecisionMade("straggler", "accuse", "rank 1.0: data takes 3.00 times", data, 24.0))
    reported.records.insert(-1, r.DecisionMade("straggler", "clear", "rank 1.0: data is as with the others", data, 24.5))
    cases = build_report(reported.records).to_dict()["stragglers"]["verdicts"]
    assert [(case["kind"], case["cleared_s"]) for case in cases] == [("compute", None), ("data", 24.5)]


def test_a_run_without_slow_ranks_says_nothing() -> None:
    reported = Story(world=1)
    reported.view(1, [(0, 0)], 0)
    reported.spans(0, 0, "c1000 K")
    reported.ended(1_000)
    assert "slow ranks" not in render_table(build_report(reported.records))
