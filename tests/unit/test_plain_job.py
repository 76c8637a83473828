"""What Fleet makes of the words of a job that is not its own: pure, without any process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from fleet.app import side_by_side
from fleet.errors import ProtocolError
from fleet.ledger.report import build_report
from fleet.machine.plain.files import SavedFiles
from fleet.machine.plain.job import Limits, PlainJob
from fleet.machine.plain.nodes import INJECTABLE, PlainNodes, why_not
from fleet.machine.plain.words import What, Word, read
from fleet.protocol.causes import EndWhy, Evicted, ProcessEnded, TrainRaised
from fleet.protocol.facts import FaultRecord
from fleet.protocol.records import (
    VERSION,
    CheckpointRecord,
    Committed,
    HistoryBegun,
    ProcessLost,
    Record,
    RunStarted,
    ViewPublished,
)
from fleet.protocol.types import Fault, Member, Process

WORLD = 2
SECOND = 1_000_000


class Reported:
    """A job of two ranks whose words a test writes down. Each call goes on by a second."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.job = PlainJob(WORLD, limits or Limits(4, 8, 600.0))
        self.now_us = 0
        self.records: list[Record] = [RunStarted(VERSION, "job", 0.0, 0.0, WORLD, 0, WORLD, "{}")]

    def add(self, records: Iterable[Record]) -> None:
        self.records += records

    def start(self, launch: int, loaded: str = "") -> None:
        """All ranks come up, load, and train."""
        self.now_us += SECOND
        for slot in range(WORLD):
            self.add(self.job.up(Member(slot, launch), Process("local", 100 + slot, launch), self.now_us))
        if loaded:
            self.say(launch, What.LOAD)
            self.say(launch, What.LOADED, path=loaded)
        self.say(launch, What.READY)

    def say(self, launch: int, what: What, **more: Any) -> None:
        self.now_us += SECOND
        for slot in range(WORLD):
            self.one(slot, launch, what, **more)

    def one(self, slot: int, launch: int, what: What, **more: Any) -> None:
        self.add(self.job.receive(Member(slot, launch), Word(what=what, at_us=self.now_us, **more)))

    def steps(self, launch: int, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.say(launch, What.STEP, steps=number)

    def save(self, launch: int, steps: int, path: str) -> None:
        """By rank 0, under another name first."""
        self.one(0, launch, What.SAVE, steps=steps, path=f"{path}.tmp")
        self.now_us += SECOND // 10
        self.one(0, launch, What.SAVED, steps=steps, path=f"{path}.tmp", bytes=7)
        self.one(0, launch, What.MOVED, path=f"{path}.tmp", to=path)

    def end(self, launch: int, slots: Iterable[int] = range(WORLD)) -> None:
        for slot in slots:
            self.now_us += SECOND // 10
            self.add(self.job.ended(Member(slot, launch), self.now_us / 1e6))

    def kill(self, slot: int, launch: int) -> None:
        fault = Fault(f"kill-{launch}", 0.0, "gpu", "kill_rank", slot=slot)
        for phase in ("aimed", "executed"):
            self.add(self.job.injected(FaultRecord(fault, phase, (Member(slot, launch),), at_s=self.now_us / 1e6)))

    def finish(self, launch: int) -> None:
        self.say(launch, What.DONE)
        self.end(launch)
        self.add(self.job.over(EndWhy.ALL_STEPS, "", self.now_us / 1e6))

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def report(self) -> dict[str, Any]:
        return build_report(self.records).to_dict()


def killed_once() -> Reported:
    """Steps 1 to 8 with a file of step 5, a kill, and on to step 10."""
    reported = Reported()
    reported.start(0)
    reported.steps(0, 1, 5)
    reported.save(0, 5, "/c/last.pt")
    reported.steps(0, 6, 8)
    reported.kill(1, 0)
    reported.end(0, (1, 0))
    reported.start(1, "/c/last.pt")
    reported.steps(1, 1, 5)
    reported.finish(1)
    return reported


def test_a_restart_goes_back_to_the_step_of_the_file_that_the_script_has_loaded() -> None:
    reported = killed_once()
    data = reported.report()
    assert data["status"] == "completed"
    assert data["steps"] == 10
    assert data["rolled_back_steps"] == 3
    assert [(each["first_step"], each["last_step"]) for each in data["rollbacks"]] == [(6, 8)]
    assert [record.from_state.step for record in reported.of(HistoryBegun)] == [5]
    assert {check["verdict"] for check in data["checks"]} <= {"ok", "unknown"}


def test_every_rank_second_is_in_one_category() -> None:
    data = killed_once().report()
    assert data["closes"]
    assert sum(data["categories"].values()) == pytest.approx(WORLD * data["wall_s"])
    spent = {name for name, seconds in data["categories"].items() if seconds}
    assert spent == {"compute", "rework", "checkpoint_stall", "restore", "detect", "provision", "init", "finish"}
    steps, beside_the_save, begun = 2 * 3.0, 0.1, 2 * 0.1
    assert data["categories"]["rework"] == pytest.approx(steps + beside_the_save + begun)
    assert data["categories"]["checkpoint_stall"] == pytest.approx(0.1)
    assert data["categories"]["detect"] == pytest.approx(0.1), "rank 0 waits until the launcher ends it"


def test_all_that_a_kill_took_along_is_charged_to_its_fault() -> None:
    reported = killed_once()
    first, second = reported.of(ProcessLost)
    assert (first.member, first.cause, first.fault) == (Member(1, 0), ProcessEnded(-9), "kill-0")
    assert (second.member, type(second.cause), second.fault) == (Member(0, 0), Evicted, "kill-0")
    (fault,) = reported.report()["faults"]
    assert sorted(fault["members"]) == ["0.0", "1.0"]
    assert fault["cost_s"] > 0 < fault["init_s"]
    assert reported.of(ViewPublished)[1].causes == ("1.0",)


def test_a_file_that_was_never_renamed_is_no_checkpoint_of_that_name() -> None:
    reported = Reported()
    reported.start(0)
    reported.steps(0, 1, 2)
    reported.save(0, 2, "/c/last.pt")
    reported.steps(0, 3, 4)
    reported.one(0, 0, What.SAVE, steps=4, path="/c/last.pt.tmp")
    reported.one(0, 0, What.SAVED, steps=4, path="/c/last.pt.tmp")
    reported.kill(0, 0)
    reported.end(0)
    reported.start(1, "/c/last.pt")
    assert [record.from_state.step for record in reported.of(HistoryBegun)] == [2]
    assert [(record.checkpoint, record.state.step) for record in reported.of(CheckpointRecord)] == [("/c/last.pt", 2)]


def test_without_a_file_that_was_seen_a_restart_begins_at_step_0() -> None:
    reported = Reported()
    reported.start(0)
    reported.steps(0, 1, 3)
    reported.kill(0, 0)
    reported.end(0)
    reported.start(1, "/elsewhere/model.bin")
    reported.steps(1, 1, 4)
    reported.finish(1)
    data = reported.report()
    assert (data["steps"], data["rolled_back_steps"]) == (4, 3)
    assert "the script has loaded no checkpoint of this run" in reported.of(HistoryBegun)[0].reason


def test_a_step_counts_once_every_rank_has_ended_it() -> None:
    reported = Reported()
    reported.start(0)
    reported.one(0, 0, What.STEP, steps=1)
    assert not reported.of(Committed)
    reported.one(1, 0, What.STEP, steps=1)
    assert [record.state.step for record in reported.of(Committed)] == [1]


def test_a_step_that_one_rank_has_saved_counts_though_another_rank_has_not_ended_it() -> None:
    reported = Reported()
    reported.start(0)
    reported.steps(0, 1, 1)
    reported.one(0, 0, What.STEP, steps=2)
    reported.save(0, 2, "/c/last.pt")
    reported.one(0, 0, What.STEP, steps=3)
    reported.kill(1, 0)
    reported.end(0, (1, 0))
    reported.start(1, "/c/last.pt")
    reported.steps(1, 1, 2)
    reported.finish(1)
    data = reported.report()
    assert (data["steps"], data["rolled_back_steps"], data["closes"]) == (4, 0, True)


def fail(reported: Reported, launch: int, steps: int) -> None:
    reported.start(launch, "/c/last.pt" if launch else "")
    reported.steps(launch, 1, steps)
    reported.say(launch, What.RAISED, text="ValueError: no samples")
    reported.end(launch)


def test_a_script_that_fails_without_a_step_in_between_is_given_up() -> None:
    reported = Reported(Limits(3, 8, 600.0))
    for launch in range(3):
        assert reported.job.verdict is None
        fail(reported, launch, 0)
    assert reported.job.verdict == ("the script failed 3 times by itself, without an optimizer step in between", "ValueError: no samples")
    assert isinstance(reported.of(ProcessLost)[0].cause, TrainRaised)


def test_a_script_that_always_fails_at_the_same_step_is_given_up_too() -> None:
    reported = Reported(Limits(3, 5, 600.0))
    for launch in range(5):
        assert reported.job.verdict is None
        fail(reported, launch, 2)
    assert reported.job.verdict is not None
    assert "5 times" in reported.job.verdict[0]


def test_what_chaos_has_ended_is_no_failure_of_the_script() -> None:
    reported = Reported(Limits(1, 1, 600.0))
    reported.start(0)
    reported.kill(0, 0)
    reported.end(0)
    assert reported.job.verdict is None


def test_what_ends_because_the_run_is_to_end_is_not_lost() -> None:
    reported = Reported()
    reported.start(0)
    reported.steps(0, 1, 2)
    reported.job.leave()
    reported.end(0)
    reported.add(reported.job.over(EndWhy.STOPPED, "SIGINT", reported.now_us / 1e6))
    data = reported.report()
    assert (data["status"], data["reason"], data["steps"], data["closes"]) == ("stopped", "SIGINT", 2, True)
    assert data["counts"]["losses"] == 0


@pytest.mark.parametrize(
    "line", [b"{}", b"no JSON", b'{"what": "step"}', b'{"what": "sing", "at_us": 1}', b'{"what": "up", "at_us": 1, "x": 2}']
)
def test_what_no_rank_can_have_told_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="a rank has sent"):
        read(line)


def test_files_keep_their_steps_under_new_names() -> None:
    files = SavedFiles()
    files.saved("a.tmp", 3)
    files.moved("a.tmp", "a")
    files.copied("a", "best")
    files.saved("a", 5)
    assert [files.step_of(name) for name in ("a", "best", "a.tmp", "other")] == [5, 3, None, None]
    files.moved("unknown", "best")
    assert files.step_of("best") is None


def test_nodes_are_groups_of_ranks_that_are_lost_and_come_back() -> None:
    nodes = PlainNodes(5, 2)
    assert nodes.up() == {0: (0, 1, 2), 1: (3, 4)}
    assert nodes.lose(1)
    assert not nodes.lose(1)
    assert [nodes.is_up(slot) for slot in range(5)] == [True, True, True, False, False]
    assert nodes.restore() == 1
    assert nodes.up() == {0: (0, 1, 2), 1: (3, 4)}


def test_only_signals_to_processes_strike_a_job_that_is_not_fleets() -> None:
    assert set(INJECTABLE) == {"kill_rank", "lose_node", "maintenance", "hang", "slow"}
    assert why_not("flip_weight").startswith("flip_weight is done by the rank's process")


def test_two_runs_stand_side_by_side() -> None:
    reported = killed_once().report()
    rows: Mapping[str, tuple[str, ...]] = {
        head: tuple(cells) for head, *cells in side_by_side.table([reported, reported], ["one", "other"])
    }
    assert rows["steps computed twice"] == ("3", "3")
    assert rows["- rework"][0].endswith("%")
    assert side_by_side.kind_of_run({"plain": []}) == "as it is (torchrun)"
    assert side_by_side.same_faults([reported, reported]) == "No faults were planned for them."
