"""What is written down before a rank that hangs is ended: everyone's stacks, where each is, and its last collective."""

from __future__ import annotations

import ctypes
import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

from fleet.app.report import build_report, render_table
from fleet.protocol.records import EvidenceKept, ProcessLost
from tests.fault.test_bad_luck import FAST, after, fault_free, of, settings, survived, train_through
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.support.waiting import until

__all__ = ["fault_free"]


def hangs_in_slot_1(run: Any) -> None:
    """The user's code hangs in step 10, once; the process beats."""

    def this_is_where_it_hangs(run: Any, step: Any) -> None:
        if run.slot == 1 and step.number == 10 and trains.once(run, "hang"):
            time.sleep(600)

    trains._loop(run, in_shard=this_is_where_it_hangs)


def test_a_loop_that_hangs_leaves_everyones_stacks(tmp_path: Path, fault_free: str) -> None:
    quick = dataclasses.replace(FAST, quiesce_s=3.0, form_s=4.0, progress_s=5.0)
    chosen = dataclasses.replace(settings(tmp_path), timeouts=quick)
    outcome, records, digest = train_through(hangs_in_slot_1, chosen, tmp_path)
    survived(outcome, records, digest, fault_free, hung=True)
    kept = of(EvidenceKept, records)
    assert {member.slot for record in kept for member in record.members} == {0, 1, 2}
    text = (tmp_path / kept[0].path).read_text()
    assert "this_is_where_it_hangs" in text
    assert "reduction of step 10, not ended" in text
    assert "hang-1" in render_table(build_report(records))


def validates_in_slot_1(run: Any) -> None:
    """Something of the user's own, behind the commit of step 10, until the test has seen it."""

    def validate(run: Any, step: Any, committed: bool) -> None:
        if committed and run.slot == 1 and step.number == 10:
            flags = Path(run.options["flags"])
            (flags / "validates").touch()
            until((flags / "seen").exists, "the test has seen it", 60.0)

    trains._loop(run, tail=validate)


def test_what_a_loop_does_of_its_own_behind_a_commit_is_a_long_call(tmp_path: Path, fault_free: str) -> None:
    """Else it would be a hang once it takes ten times as long as a step. The others wait for it in their reduction."""
    chosen, flags = settings(tmp_path), tmp_path / "flags"
    with PlainFleet(validates_in_slot_1, chosen, tmp_path) as fleet:
        until((flags / "validates").exists, "it validates", 60.0)
        began_s, roster = fleet.coordinator.machine.state.uptime.ticked_s, fleet.coordinator.machine.state.roster
        until(lambda: roster.long_call_s > began_s + 1.0, "the coordinator knows that it is behind a commit", 20.0)
        (flags / "seen").touch()
        assert fleet.wait().status == "completed"
        ended = fleet.coordinator.machine.state.ending.record
        assert ended is not None and ended.digest == fault_free
        assert not of(ProcessLost, fleet.records())
        assert roster.long_call_s < fleet.coordinator.machine.state.uptime.ticked_s, "and that it steps again"


def holds_the_interpreter_in_slot_1(run: Any) -> None:
    """Nothing else runs in the process, once; not even the thread that beats."""

    def this_is_where_it_holds_it(run: Any, step: Any) -> None:
        if run.slot == 1 and step.number == 10 and trains.once(run, "hang"):
            ctypes.PyDLL(None).sleep(600)

    trains._loop(run, in_shard=this_is_where_it_holds_it)


def test_who_does_not_hear_the_word_leaves_its_stacks_too(tmp_path: Path, fault_free: str) -> None:
    outcome, records, digest = train_through(holds_the_interpreter_in_slot_1, settings(tmp_path), tmp_path)
    survived(outcome, records, digest, fault_free)
    text = "".join((tmp_path / record.path).read_text() for record in of(EvidenceKept, records))
    assert "this_is_where_it_holds_it" in text
    assert "(no stacks)" not in text


def test_a_stopped_rank_is_evicted_and_replaced_and_its_evidence_says_so(tmp_path: Path, fault_free: str) -> None:
    def misfortune(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1, signal.SIGSTOP)

    outcome, records, digest = train_through(trains.plain, settings(tmp_path), tmp_path, misfortune)
    survived(outcome, records, digest, fault_free)
    [lost] = of(ProcessLost, records)
    assert lost.member.slot == 1
    assert "no heartbeat" in str(lost.cause)
    assert "stopped by a signal" in "".join(record.detail for record in of(EvidenceKept, records))
