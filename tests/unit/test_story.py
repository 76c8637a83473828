"""``fleet report --why``: the story of one loss, from what was seen to the first step without the rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.ledger.story import why
from fleet.protocol.causes import AgentHungUp, Departure, GatherWhy, ProcessEnded
from fleet.protocol.decisions import Gathering
from fleet.protocol.events import Formed, Quiesced, Tick
from fleet.protocol.instructions import Quiesce, Write
from fleet.protocol.records import (
    VERSION,
    Committed,
    DecisionMade,
    FaultRecord,
    ProcessLost,
    ProcessUp,
    Received,
    Record,
    RunStarted,
    ViewPublished,
)
from fleet.protocol.types import Fault, Member, Process, StateId, View
from tests.unit.test_machine import Bench, member

GONE = Member(3, 0)
FAULT = Fault("gpu-1", 1.0, "gpu", "kill_rank", slot=3)


def view(generation: int, members: tuple[Member, ...], step: int) -> View:
    width = 16 // len(members)
    ranges = tuple((width * i, width * (i + 1)) for i in range(len(members)))
    return View(generation, members, ranges, 0, (), StateId(0, step), "127.0.0.1:1")


def journal(loss_at_s: float = 10.0) -> list[Record]:
    """Rank 3.0 of four is killed; the others form a view of two, as 2.0 is lost with it, and go on; 3.1 comes in later."""
    first, second, third = (Member(slot, 0) for slot in range(3))
    all_four, left = (first, second, third, GONE), (first, second)
    back = (*left, Member(3, 1))
    at_s = loss_at_s
    return [
        RunStarted(VERSION, "reported", 0.0, 1.7e9, 4, 0, 16, "{}"),
        *(ProcessUp(each, Process(f"n{each.slot % 2}", 100 + each.slot, 1), "t", 0.5, event=1 + each.slot) for each in all_four),
        ViewPublished(view(1, all_four, 0), 1.0, "4 ranks", False, (), event=9),
        Received(12, "Formed", 1.5, first, "n0", 1, 0),
        Committed(StateId(0, 118), 9.9, event=40),
        FaultRecord(FAULT, "executed", (GONE,), "", at_s=at_s - 0.002, event=41),
        Received(42, "ProcessLost", at_s + 0.001, GONE, "n1", 1, 118),
        ProcessLost(GONE, ProcessEnded(), "gpu-1", 1, 118, 13, "", at_s=at_s, event=42),
        DecisionMade("recovery", "gather", "rank 3.0 lost: its process ended", Gathering(GatherWhy.LOST, (3, 0)), at_s + 0.001, event=42),
        Received(43, "Quiesced", at_s + 0.003, first, "n0", 1, 118, "broken: a peer is gone"),
        Received(44, "NodeSilent", at_s + 0.004, None, "n0"),
        ProcessLost(third, AgentHungUp(missed=True), None, 1, 118, -1, "", at_s=at_s + 0.004, event=44),
        Received(45, "Quiesced", at_s + 0.005, second, "n1", 1, 118, "called: told to leave"),
        DecisionMade("recovery", "form", "2 ranks left, 0 promoted or new", None, at_s + 0.006, event=45),
        ViewPublished(view(2, left, 118), at_s + 0.006, "2 ranks left", False, ("3.0", "2.0"), event=45),
        Received(46, "Formed", at_s + 0.030, first, "n0", 2, 118),
        Received(47, "Formed", at_s + 0.031, second, "n1", 2, 118),
        Committed(StateId(0, 119), at_s + 0.110, event=50),
        Committed(StateId(0, 120), at_s + 0.210, event=51),
        ProcessUp(Member(3, 1), Process("n1", 200, 2), "u", at_s + 2.1, event=60),
        ViewPublished(view(3, back, 130), at_s + 3.0, "1 of 2 missing ranks are ready", True, (), event=70),
        Committed(StateId(0, 131), at_s + 3.5, event=71),
    ]


STORY = """\
rank 3.0 was lost in step 118, 10.0 s after the start, 2023-11-14 22:13:30 UTC: its process ended, by fault gpu-1; it was in view 1 on node n1

22:13:29.998Z     -0.002 s  #41      chaos        fault gpu-1: SIGKILL to rank 3 (gpu)
22:13:30.000Z     +0.000 s  #42      agent n1     has seen the end of rank 3.0
22:13:30.001Z     +0.001 s  #42      coordinator  rank 3.0 is declared lost: its process ended
22:13:30.001Z     +0.001 s  #42      coordinator  recovery decides gather: rank 3.0 lost: its process ended
22:13:30.003Z     +0.003 s  #43      rank 0.0     has left view 1, at step 118 (broken: a peer is gone)
22:13:30.004Z     +0.004 s  #44      coordinator  the line to the agent of node n0 broke
22:13:30.004Z     +0.004 s  #44      coordinator  rank 2.0 is declared lost, too: its agent hung up, and its ranks are missed
22:13:30.005Z     +0.005 s  #45      rank 1.0     has left view 1, at step 118 (called: told to leave)
22:13:30.006Z     +0.006 s  #45      coordinator  recovery decides form: 2 ranks left, 0 promoted or new
22:13:30.006Z     +0.006 s  #45      coordinator  view 2 is formed, from step 118: ranks 0.0, 1.0; of its shards 12-15 to 1.0
22:13:30.030Z     +0.030 s  #46      rank 0.0     is in view 2, at step 118
22:13:30.031Z     +0.031 s  #47      rank 1.0     is in view 2, at step 118
22:13:30.110Z     +0.110 s  #50      coordinator  step 119 is committed: training goes on
22:13:32.100Z     +2.100 s  #60      coordinator  a process fills slot 3 as rank 3.1, on node n1
22:13:33.000Z     +3.000 s  #70      coordinator  view 3 is proposed beside the running steps, from step 130: ranks 0.0, 1.0, 3.1; its slot is filled again
"""  # noqa: E501 - lines as they are printed


@pytest.mark.parametrize("name", ["3.0", "3"])
def test_a_loss_is_told_from_what_was_seen_until_training_goes_on_and_the_slot_is_filled(name: str) -> None:
    assert str(why(journal(), name)) == STORY


def test_the_newest_loss_of_a_slot_is_meant_by_its_number() -> None:
    again = ProcessLost(Member(3, 1), ProcessEnded(-9), None, -1, -1, -1, "", at_s=14.0, event=80)
    story = why([*journal(), again], "3")
    assert story.loss.member == Member(3, 1)
    assert str(story).startswith(
        "rank 3.1 was lost, 14.0 s after the start, 2023-11-14 22:13:34 UTC: killed by SIGKILL; it was in no view on node n1"
    )
    assert why([*journal(), again], "3.0").loss.member == GONE


@pytest.mark.parametrize("name", ["0.0", "1", "9.0", "x"])
def test_a_rank_that_was_not_lost_is_refused_with_those_that_were(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--why = '{name}': no such rank was lost.*were lost: 3\.0, 2\.0\."):
        why(journal(), name)
    with pytest.raises(ConfigError, match="were lost: none"):
        why([record for record in journal() if not isinstance(record, ProcessLost)], name)


def test_the_command_tells_it_as_text_and_as_json_and_refuses_others(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "demo" / "journal.jsonl")
    for record in journal():
        writer.append(record)
    writer.close()
    runner = CliRunner()
    run = ["report", "demo", "--storage", str(tmp_path), "--why"]
    assert runner.invoke(app, [*run, "3.0"]).stdout == STORY
    reported = json.loads(runner.invoke(app, [*run, "3", "--json"]).stdout)
    assert (reported["rank"], reported["at_s"], reported["damage"]) == ("3.0", 10.0, "")
    assert reported["moments"][1] == {
        "after_s": 0.0, "at_utc": "2023-11-14T22:13:30.000Z", "event": 42, "who": "agent n1", "text": "has seen the end of rank 3.0",
    }  # fmt: skip
    assert isinstance(runner.invoke(app, [*run, "7"]).exception, ConfigError)
    with (tmp_path / "demo" / "journal.jsonl").open("ab") as file:
        file.write(b'["ProcessLost",[1,0],["Vanished"],null,1,1,-1,"",20.0,99]\n')
    damaged = runner.invoke(app, [*run, "3"])
    assert damaged.stdout == STORY and "only what lies before is told" in damaged.stderr


# ---- what the machine writes of events ---------------------------------------------------------------------------------------------------


def written(bench: Bench, event: object) -> list[Record]:
    out = bench.machine.handle(event, bench.now_s)  # type: ignore[arg-type]
    return [each.record for each in out if isinstance(each, Write)]


def test_whatever_follows_from_an_event_names_it() -> None:
    bench = Bench(world=3).start(StateId(0, 5))
    before = bench.machine.state.output.event
    out = bench.machine.handle(ProcessLost(member(2), ProcessEnded(), step=5, shard=1, at_s=bench.now_s), bench.now_s)
    records = [each.record for each in out if isinstance(each, Write)]
    assert [type(record) for record in records][:2] == [Received, ProcessLost]
    assert records[0] == Received(before + 1, "ProcessLost", bench.now_s, member(2), "n0", 1, 5)
    assert {record.event for record in records} == {before + 1}  # type: ignore[union-attr]
    assert [each.event for each in out if isinstance(each, Quiesce)] == [before + 1]


def test_what_ranks_say_is_told_once_and_what_changes_nothing_never() -> None:
    bench = Bench(world=2).start(StateId(0, 5))
    quiesced = Quiesced(member(0), 1, StateId(0, 5), dirty=False, why=Departure.BROKEN, detail="a peer is gone")
    [received, *_] = written(bench, quiesced)
    assert isinstance(received, Received) and (received.what, received.step, received.detail) == ("Quiesced", 5, "broken: a peer is gone")
    assert not [record for record in written(bench, quiesced) if isinstance(record, Received)]
    assert not written(bench, Tick()) and not written(bench, Formed(member(0), 1, StateId(0, 5))), "it has left that view"


def test_numbers_go_on_after_a_restart() -> None:
    bench = Bench(world=2).start(StateId(0, 5))
    records = written(bench, ProcessLost(member(1), ProcessEnded(), step=5, shard=1, at_s=bench.now_s))
    newest = bench.machine.state.output.event
    again = bench.new_machine()
    again.replay([*bench.journal, *records], bench.now_s)
    assert newest > 1 and again.state.output.event == newest
