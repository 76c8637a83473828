"""The lines that a user reads while a run goes on, from records that were written by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fleet.ledger.happenings import PATIENCE_S, Narrator
from fleet.protocol import records as r
from fleet.protocol.causes import Cause, Evicted, ProcessEnded, StartsAgain, TrainRaised
from fleet.protocol.types import Fault, Member, StateId
from tests.golden.journals import Story, one_loss


def reported(records: Iterable[r.Record]) -> list[str]:
    narrator, lines = Narrator(), list[str]()
    for record in records:
        lines += [str(line) for line in narrator.take(record, 0.0)]
    return [*lines, *map(str, narrator.rest())]


def story(*more: r.Record) -> list[r.Record]:
    return [*Story(world=3).records, *more]


KILL = Fault("gpu-1", 2.0, "gpu", "kill_rank", slot=1)
PLANNED, EXECUTED = (r.FaultRecord(KILL, phase, (Member(1, 0),), "", at_s=at_s) for phase, at_s in (("planned", 0.5), ("executed", 2.1)))


FIRST = Member(1, 0)
ENDED = ProcessEnded()


def lost(member: Member = FIRST, fault: str | None = "gpu-1", cause: Cause = ENDED) -> r.ProcessLost:
    return r.ProcessLost(member, cause, fault, 1, 7, -1, "", at_s=2.2)


def test_a_fault_comes_before_the_loss_that_it_caused_though_the_journal_learns_of_it_later() -> None:
    back = r.HistoryBegun(1, StateId(0, 5), 2.3, "no rank holds a clean state")
    lines = reported(story(PLANNED, r.Committed(StateId(0, 7), 2.0), lost(), back, EXECUTED))
    assert lines == [
        "    2.1 s  ! fault gpu-1: SIGKILL to rank 1 (gpu)",
        "    2.2 s  - rank 1 is lost in step 7: killed (SIGKILL) by fault gpu-1",
        "    2.3 s  < goes on from step 5, 2 are rolled back: no rank holds a clean state",
    ]


def test_a_loss_waits_for_its_fault_for_a_moment_and_no_longer() -> None:
    narrator = Narrator()
    for record in story(PLANNED):
        assert narrator.take(record, 0.0) == []
    assert narrator.take(lost(), 10.0) == [] and narrator.due(10.0 + PATIENCE_S) == []
    [line] = narrator.due(10.1 + PATIENCE_S)
    assert "by fault gpu-1" in line.text
    assert [line.mark for line in narrator.take(EXECUTED, 13.0)] == ["!"]
    assert [line.mark for line in narrator.take(lost(Member(1, 1)), 14.0)] == ["-"], "its fault is known to have struck"


def test_who_was_ended_for_the_sake_of_a_fault_was_not_struck_by_it() -> None:
    taken = lost(Member(0, 0), cause=Evicted(StartsAgain("all start again")))
    line = reported(story(PLANNED, EXECUTED, lost(), taken))[-1]
    assert line == "    2.2 s  - rank 0 is lost in step 7: evicted: all start again by fault gpu-1"


def test_a_loss_without_a_fault_is_told_at_once_with_its_cause_in_one_line() -> None:
    [line] = reported(story(lost(Member(2, 1), None, TrainRaised("ValueError: no\nheartbeat"))))
    assert line == "    2.2 s  - rank 2.1 is lost in step 7: the train function raised ValueError: no heartbeat"


def test_a_loss_is_told_with_how_its_process_ended_as_soon_as_that_is_known() -> None:
    narrator = Narrator()
    for record in story(lost(fault=None), r.HistoryBegun(1, StateId(0, 5), 2.3, "none left")):
        assert narrator.take(record, 0.0) == []
    assert narrator.take(r.LossExplained(Member(1, 7), ProcessEnded(3), at_s=2.4), 0.1) == [], "of another process"
    reported = narrator.take(r.LossExplained(FIRST, ProcessEnded(-11), at_s=2.4), 0.1)
    assert [line.text for line in reported] == ["rank 1 is lost in step 7: killed by SIGSEGV", "goes on from step 5: none left"]
    assert narrator.take(lost(Member(1, 1), None), 1.0) == []
    assert [line.text for line in narrator.due(1.1 + PATIENCE_S)] == ["rank 1.1 is lost in step 7: its process ended"]


def test_what_costs_nothing_is_not_told() -> None:
    assert [line[11] for line in reported(one_loss("gpu-1").records)] == ["!", "-"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (r.Resumed(3.0, 1.7e9, "the coordinator was restarted", "c", gap=False), "* the coordinator was restarted; the ranks trained on"),
        (
            r.CheckpointRecord("", "skipped", StateId(0, 9), 3.0, detail="given up after 4 tries"),
            "* checkpoint of step 9 skipped: given up after 4 tries",
        ),
        (
            r.CheckpointRecord("x", "failed", StateId(0, 9), 3.0, detail="disk full", level="peers"),
            "* copy in memory of step 9 failed: disk full",
        ),
        (r.CheckpointRecord("x", "failed", StateId(0, 9), 3.0, detail="the view changed", view_changed=True), ""),
        (r.CheckpointRecord("x", "durable", StateId(0, 9), 3.0), ""),
        (r.CheckpointRecord("x", "durable", StateId(0, 60), 3.0), "* final checkpoint: step 60 is durable"),
        (r.DecisionMade("store", "warn", "no answer for 30 s", None, 3.0), "* store: warn: no answer for 30 s"),
        (r.DecisionMade("corruption", "go_back", "why", None, 3.0), "* corruption: go back: why"),
        (r.DecisionMade("recovery", "form", "enough", None, 3.0), ""),
        (r.EvidenceKept("hang-1", "evidence/a", (), "no progress", "", at_s=3.0), "* hang-1: no progress; stacks in evidence/a"),
        (
            r.FaultRecord(
                Fault("n", 1, "nic", "slow", severity=2.0, duration_s=6.0), "executed", (Member(0, 0), Member(1, 2)), "x", at_s=3.0
            ),
            "! fault n: ranks 0, 1.2 at 1/2 of its speed for 6.0 s (nic); x",
        ),
    ],
)
def test_each_thing_that_costs_something_is_one_line(record: r.Record, text: str) -> None:
    lines = reported(story(r.DataRead(Member(0, 0), 512, 64, "", 60, at_s=1.0), record))
    assert [line[11:] for line in lines] == ([text] if text else [])
