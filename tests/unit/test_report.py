"""The report: its keys, its figures, and how it reads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fleet.app.report import render_table
from fleet.ledger.goodput import Ledger
from fleet.ledger.report import History, build_report, duration, losses_by_size, rank_time, report_of
from fleet.ledger.timeline import Timeline
from fleet.protocol import records as r
from fleet.protocol.decisions import Interval
from fleet.protocol.types import Fault, Member, StateId
from tests.golden.journals import Story, one_loss

GOLDEN = Path(__file__).parents[1] / "golden"
"""Written by ``python -m tests.unit.test_report``. A change of these files is a change of what users and their tools read."""


def golden_story() -> Story:
    story = one_loss(fault="gpu-1")
    end = story.records.pop()
    story.records += [
        r.DecisionMade("interval", "wait", "every 10.0 s: the first one, to learn what it costs", Interval(10.0), 1.1),
        r.CheckpointRecord("c60", "durable", StateId(0, 60), 7.3, 1_000_000, 0.002, 0.1),
        r.Measurement(None, StateId(0, 1), "loss", 2.5, at_s=1.2),
        r.Measurement(None, StateId(0, 2), "loss", math.nan, at_s=1.3),
        r.Usage(Member(0, 0), 500_000_000, 0, 12_000_000, 60, 120_000, 12_000_000, 1_500_000, at_s=7.2),
        r.FaultRecord(Fault("gpu-2", 9.0, "gpu", "kill_rank", slot=0), "suppressed", (), "the run is about to end", at_s=7.2),
        end,
    ]
    return story


def test_the_json_is_what_it_was() -> None:
    assert build_report(golden_story().records).to_json() == (GOLDEN / "report.json").read_text()


def test_the_table_is_what_it_was() -> None:
    assert render_table(build_report(golden_story().records)) == (GOLDEN / "report.txt").read_text()


def test_the_json_has_the_keys_that_tools_rely_on() -> None:
    report = json.loads(build_report(golden_story().records).to_json())
    assert report.keys() >= {
        "run", "status", "reason", "wall_s", "world", "spares", "steps", "goodput", "scheduling_goodput", "ettr", "other_ratio", "closes",
        "categories", "faults", "losses", "views", "checkpoints", "decisions", "measurements", "counts",
    }  # fmt: skip
    assert report["counts"].keys() >= {"faults_by_kind", "planned", "executed", "suppressed", "healed", "in_view_losses"}
    assert report["counts"]["faults_by_kind"] == {"kill_rank": {"executed": 1, "suppressed": 1}}
    assert sum(report["categories"].values()) == pytest.approx(
        (report["world"] + report["spares"]) * (report["wall_s"] - report["down_s"]), abs=1e-6
    )
    assert report["measurements"] == {"loss": [[1, 2.5], [2, None]]}
    assert [fault["id"] for fault in report["faults"]] == ["gpu-1", "gpu-2"]


def test_pending_time_is_pending_and_no_loss() -> None:
    ledger, history = Ledger(Timeline()), History()
    for record in one_loss().records[:-1]:
        ledger.apply(record)
        history.add(record)
    summary = ledger.summary(9.0)
    text = render_table(report_of(ledger, history, summary))
    assert summary.pending_s == pytest.approx(2 * (9.0 - 7.33))
    assert "- pending" not in text and "not decided yet, and in no share" in text
    shares = [float(line.split("%")[0].split()[-1]) for line in text.splitlines() if line.startswith(("  - ", "  = "))]
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert "pending" not in dict(losses_by_size(summary))


def test_a_run_that_was_stopped_says_for_how_long() -> None:
    story = one_loss()
    story.resumed(10_807_340)
    story.ended(10_808_000)
    report = build_report(story.records)
    text = render_table(report)
    assert "2 ranks for 8.0 s, and stopped for 3 h 00 m" in text
    assert "stopped for 3 h 00 m  -" in text, "it stands among the faults, with what it cost beside its length"
    assert json.loads(report.to_json())["down_s"] == pytest.approx(10_800)
    assert report.summary.closes


def test_a_run_that_is_still_going_on_can_be_reported() -> None:
    story = one_loss()
    for length in range(1, len(story.records)):
        report = build_report(story.records[:length])
        assert "running" in render_table(report)
        assert json.loads(report.to_json())["closes"] is True


def test_colour_adds_codes_and_nothing_else() -> None:
    report = build_report(one_loss().records)
    coloured = render_table(report, colour=True)
    assert "\033[" in coloured
    for code in ("\033[32m", "\033[31m", "\033[1m", "\033[2m", "\033[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == render_table(report)


def test_a_table_of_many_losses_stays_short_and_narrow() -> None:
    story = Story(world=40)
    story.view(1, [(slot, 0) for slot in range(40)], 0)
    for slot in range(40):
        story.spans(slot, 0, "c60 x40 K")
        story.lost(slot, 0, 100 + slot, cause="x" * 100)
    story.ended(40_000_000)
    text = render_table(build_report(story.records))
    assert "and 15 more" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_name_of_a_fault_can_be_searched_for() -> None:
    name = "switch_or_cable-0000"
    assert f" {name} " in render_table(build_report(one_loss(name).records))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.0, "0 ms"), (0.0854, "85 ms"), (0.9996, "1.0 s"), (12.34, "12.3 s"), (245.0, "4 m 05 s"), (26_400.0, "7 h 20 m"),
        (276_480.0, "3.2 d"), (-0.01, "-10 ms"),
    ],
)  # fmt: skip
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_rank_time_turns_to_hours() -> None:
    assert (rank_time(12.345), rank_time(36_000_000.0)) == ("12.35 s", "10,000.0 h")


if __name__ == "__main__":
    (GOLDEN / "report.json").write_text(build_report(golden_story().records).to_json())
    (GOLDEN / "report.txt").write_text(render_table(build_report(golden_story().records)))
