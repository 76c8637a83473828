"""What a run's ledger says about why it was slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.host.journal import JournalWriter
from fleet.ledger.diagnosis import RULES, TimeFinding, diagnose, explain
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.records import Usage
from fleet.protocol.types import Member
from tests.golden.journals import Story, one_loss

GOODPUT = ("compute",)
"""The only category that is no loss."""
GOLDEN = Path(__file__).parents[1] / "golden" / "diagnosis.txt"


def summary(story: Story) -> LedgerSummary:
    return Ledger().apply_all(story.records).summary()


def steady(codes: dict[int, str], steps: int = 50) -> Story:
    """A run without faults; every slot does the same in each step."""
    story = Story(world=len(codes))
    story.view(1, [(slot, 0) for slot in codes], 0)
    for slot, text in codes.items():
        story.spans(slot, 0, f"{text} K " * steps)
    ends_ms = max(story.ends_us.values()) / 1e3
    for step in range(1, steps + 1):
        story.committed(step, ends_ms * step / steps)
    story.ended(ends_ms)
    return story


def first(story: Story) -> TimeFinding:
    return diagnose(summary(story))[0]


def test_golden() -> None:
    found = summary(one_loss("gpu-1"))
    assert explain(found, diagnose(found)) == GOLDEN.read_text()


def test_every_way_to_lose_time_has_a_rule() -> None:
    """A rank-second is goodput, or some finding is about it."""
    categories = set(summary(one_loss()).categories)
    reported = {name for name in categories - set(GOODPUT) if any(_names(rule, name) for rule in RULES)}
    assert reported == categories - set(GOODPUT)


def _names(rule: Callable[[LedgerSummary], TimeFinding | None], name: str) -> bool:
    found = rule(replace(summary(one_loss()), spares=1, in_view_losses=0))
    return found is not None and found.metric == name


@pytest.mark.parametrize(
    ("codes", "metric", "where", "layer", "said"),
    [
        ({0: "c60 w40", 1: "c100 w0", 2: "c62 w38"}, "straggler_wait", "coordination", "the node of slot 1", "Slot 1 waited 0.0%"),
        ({0: "c60 w40", 1: "c60 w40"}, "straggler_wait", "coordination", "the batch: shards that take unequal time", "All slots wait"),
        ({0: "c40 x60", 1: "c40 x60"}, "exposed_comm", "communication", "the reduction of gradients", "rho = 1.50"),
        ({0: "c40 d60", 1: "c40 d60"}, "data_wait", "coordination", "the feed: storage and decoding", "waits 60 ms"),
        ({0: "c40 k60", 1: "c40 k60"}, "checkpoint_stall", "coordination", "snapshots and the store", "60.0%"),
        ({0: "c40 v60", 1: "c40 v60"}, "verify", "compute", "the defence against silent corruption", "150.0% of the steps' compute"),
        (
            {0: "c40 e60", 1: "c40 e60"},
            "finish",
            "coordination",
            "the end of the run: the last checkpoint, and processes that leave",
            "finish took",
        ),
    ],
)
def test_the_dearest_thing_is_named_first(codes: dict[int, str], metric: str, where: str, layer: str, said: str) -> None:
    finding = first(steady(codes))
    assert (finding.metric, finding.where, finding.layer) == (metric, where, layer)
    assert any(said in sentence for sentence in finding.evidence), finding.evidence


def measured(codes: dict[int, str], exchanges: int, hidden_us: int) -> LedgerSummary:
    story = steady(codes)
    end = story.records.pop()
    story.records.append(Usage(Member(0, 0), 1, 0, 1, exchanges, hidden_us, 1_000, 500 if hidden_us else 0, at_s=1.0))
    story.records.append(end)
    return summary(story)


def test_the_wire_says_what_was_hidden_measured_or_not_and_what_hiding_it_is_worth() -> None:
    codes = {0: "c60 x40", 1: "c60 x40"}
    hidden, open_, silent = measured(codes, 50, 500_000), measured(codes, 50, 0), summary(steady(codes))
    said = {name: " ".join(diagnose(each)[0].evidence) for name, each in (("hidden", hidden), ("open", open_), ("silent", silent))}
    assert "40 ms a step that nothing hid, 10 ms behind computing, 20.0% of it; 50.0% of its bytes came ahead." in said["hidden"]
    assert "40 ms a step that nothing hid, 0 ms behind computing, 0.0% of it; 0.0% of its bytes came ahead." in said["open"]
    assert "is not measured" in said["silent"]
    assert "With all hidden that computing can hide, steps would be 1.67 times as fast." in said["open"]
    assert diagnose(hidden)[0].system == "communication"


def test_the_head_names_the_terms_of_a_step_and_the_one_to_attack() -> None:
    head = explain(found := summary(steady({0: "c40 x60", 1: "c40 x60"})), diagnose(found)).splitlines()
    assert head[1] == "A step by the Fleet Law: compute 40.0% + communication 60.0% + coordination 0.0% of 100 ms, with 2 ranks."
    assert "communication that nothing hides comes first: with half of T_comm, steps would be 1.43 times as fast" in head[3]
    waits = summary(steady({0: "c40 w40 x20", 1: "c40 w40 x20"}))
    assert "coordination comes first: with half of T_sync, steps would be 1.25 times as fast" in explain(waits, diagnose(waits))
    nothing = summary(Story(world=1))
    assert "Fleet Law" not in explain(nothing, diagnose(nothing))


def test_shares_are_of_all_rank_seconds_and_ranked() -> None:
    found = summary(one_loss("gpu-1"))
    findings = diagnose(found)
    assert [each.share for each in findings] == sorted((each.share for each in findings), reverse=True)
    for each in findings:
        assert each.share == pytest.approx(found.categories[each.metric] / found.rank_s)


def slow_start(lost: bool) -> Story:
    """Nobody is there for 4 s; then a second of steps. With a loss slot 1 stands empty for 2 s more, and ends with a second of steps."""
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 4000)
    for slot in (0, 1):
        story.spans(slot, 0, "c100 K " * 10, at=4000)
    if lost:
        story.lost(1, 0, 5000)
        story.spans(0, 0, "c100 K " * 30, step=10)
        story.spans(1, 1, "c100 K " * 10, at=7000, step=30)
    for step in range(1, 41 if lost else 11):
        story.committed(step, 4000 + 100 * step)
    story.ended(8000 if lost else 5000)
    return story


def test_a_cold_start_is_no_reason_for_a_spare() -> None:
    findings = diagnose(summary(slow_start(lost=False)))
    assert [each.metric for each in findings] == ["provision"]
    assert findings[0].share == pytest.approx(0.8)
    assert "fleet cluster up" in findings[0].remedy and "spare" not in findings[0].remedy


def test_a_slot_that_is_empty_after_a_loss_is_told_from_a_cold_start() -> None:
    cold, empty = diagnose(summary(slow_start(lost=True)))
    assert (cold.metric, cold.share) == ("provision", pytest.approx(8 / 16))
    assert (empty.metric, empty.share) == ("provision", pytest.approx(2 / 16))
    assert "spare" in empty.remedy and "2.00 s of all" in empty.evidence[0]


def test_after_a_resume_the_new_cluster_is_the_cold_start() -> None:
    story = Story(world=1)
    story.view(1, [(0, 0)], 0)
    story.spans(0, 0, "c100 K " * 10)
    story.committed(10, 1000)
    story.ended(1000, status="stopped")
    story.resumed(3_600_000)
    story.view(2, [(0, 1)], 3_603_000, 10)
    story.spans(0, 1, "c100 K " * 10, generation=2, step=10, at=3_603_000)
    story.committed(20, 3_604_000)
    story.ended(3_604_000)
    [cold] = diagnose(summary(story))
    assert cold.share == pytest.approx(3 / 5)
    assert "resumed 1 time." in cold.evidence[1]


def test_a_run_that_lost_nothing_has_no_finding() -> None:
    assert diagnose(summary(steady({0: "c100", 1: "c100"}))) == ()


def test_a_slot_that_is_lost_again_and_again_is_a_place_and_no_chance() -> None:
    story = Story(world=2)
    story.view(1, [(0, 0), (1, 0)], 0)
    story.spans(0, 0, "c100 K " * 40)
    story.spans(1, 0, "c100 K " * 10)
    for number in range(3):
        begin = 1000 + 500 * number
        story.lost(1, number, begin, generation=1)
        story.spans(1, number + 1, "i400 c50", generation=-1, at=begin + 50)
    for step in range(1, 41):
        story.committed(step, 100 * step)
    story.ended(4000)
    findings = diagnose(summary(story))
    assert any(each.metric == "losses" and each.layer == "the node of slot 1" and "3 times of 3" in each.evidence[0] for each in findings)


def test_the_command_says_the_same(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.jsonl")
    for record in one_loss("gpu-1").records:
        writer.append(record)
    writer.close()
    assert CliRunner().invoke(app, ["report", str(tmp_path), "--diagnose"]).stdout == GOLDEN.read_text()
    data = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--diagnose", "--json"]).stdout)
    assert data["findings"][0]["remedy"] and data["run"] == "story"
