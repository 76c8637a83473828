"""The end of a run: the last state is kept, the code behind the loop runs, and then everybody is released."""

from __future__ import annotations

import pytest

from fleet.protocol.causes import EndWhy, ProcessEnded
from fleet.protocol.decisions import LoopEnded
from fleet.protocol.events import CheckpointDurable, Finished, Left, PartFailed, PartWritten, Raised, Ready
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import (
    CommitCheckpoint,
    Conclude,
    EndAt,
    EndRun,
    Instruction,
    Publish,
    Quiesce,
    Release,
    SaveCheckpoint,
    Welcome,
)
from fleet.protocol.records import DecisionMade
from fleet.protocol.types import Part, StateId
from tests.unit.test_machine import STEP_3, STEP_4, Bench, member, only


def finished(world: int = 2, **settings: object) -> tuple[Bench, SaveCheckpoint]:
    """All have finished the last step, and are told to write it."""
    bench = Bench(world=world, **settings).start(STEP_3)  # type: ignore[arg-type]
    said: list[Instruction] = []
    for slot in range(world):
        assert not said
        said = bench.send(Finished(member(slot), 1, STEP_4, "digest"))
    return bench, only(SaveCheckpoint, said)


def concluded(world: int = 2) -> Bench:
    """The final checkpoint is durable; the code behind the loop runs."""
    bench, save = finished(world)
    parts = [PartWritten(member(slot), save.request, "c4", STEP_4, Part(f"p{slot}", 1, "", (slot,)), 0.1) for slot in range(world)]
    only(CommitCheckpoint, bench.send(*parts))
    said = bench.send(CheckpointDurable("c4", STEP_4, world, 0.1, 0.2))
    assert only(Conclude, said).members == tuple(member(slot) for slot in range(world))
    return bench


def left(bench: Bench, *slots: int) -> list[Instruction]:
    return bench.send(*(Left(member(slot), 1, STEP_4, "digest") for slot in slots))


def test_the_run_is_complete_when_its_last_state_is_kept_and_all_have_left() -> None:
    bench = concluded()
    assert not left(bench, 0)
    said = left(bench, 1)
    assert only(EndRun, said).status == "completed"
    assert only(Release, said).members == (member(0), member(1))
    assert bench.machine.state.ending.record is not None and bench.machine.state.ending.record.digest == "digest"
    assert bench.machine.state.committed == STEP_4


def test_a_state_that_is_durable_already_is_not_written_again() -> None:
    bench = Bench(world=1).start(STEP_3)
    bench.send(CheckpointDurable("c4", STEP_4, 1, 0.1, 0.2))
    said = bench.send(Finished(member(0), 1, STEP_4, "digest"))
    assert [type(one) for one in said if isinstance(one, SaveCheckpoint | Conclude)] == [Conclude]


def test_a_store_that_fails_is_tried_again_and_then_the_run_says_that_nothing_is_saved() -> None:
    bench, save = finished(1)
    said: list[Instruction] = []
    requests = {save.request}
    for _ in range(40):
        said = bench.send(PartFailed(member(0), max(requests), "the disk is full"))
        said += bench.after(20.0)
        requests |= {one.request for one in said if isinstance(one, SaveCheckpoint)}
        if any(isinstance(one, Conclude) for one in said):
            break
    assert len(requests) == 5
    end = only(EndRun, left(bench, 0))
    assert end.status == "completed, not saved"
    assert "the disk is full" in end.reason


def test_a_rank_that_writes_no_part_in_time_is_called_out() -> None:
    bench, _ = finished(2, spares=0)
    said = bench.through(bench.settings.timeouts.checkpoint_s + 2.0)
    assert only(Quiesce, said[: next(i for i, one in enumerate(said) if isinstance(one, Quiesce)) + 1]).in_person


def test_who_waits_is_told_again() -> None:
    bench = concluded()
    assert only(Conclude, bench.send(Finished(member(1), 1, STEP_4, "digest"))).members == (member(1),)
    assert not [one for one in bench.send(Finished(member(1), 1, STEP_4, "digest", True)) if isinstance(one, Conclude)]


def test_the_others_end_the_run_when_one_is_lost_behind_the_loop() -> None:
    bench = concluded()
    assert not [one for one in bench.send(ProcessLost(member(0), ProcessEnded())) if isinstance(one, Quiesce | EndRun)]
    assert only(EndRun, left(bench, 1)).status == "completed"


def test_when_all_are_lost_behind_the_loop_new_ranks_come_there_again() -> None:
    bench = concluded()
    bench.send(ProcessLost(member(0), ProcessEnded()), ProcessLost(member(1), ProcessEnded()))
    for slot in range(2):
        bench.join(slot, f"again-{slot}")
        bench.send(Ready(member(slot, 1)))
    view = only(Publish, bench.through(1.0)).view
    assert view.checkpoint == "c4" and view.state.step == STEP_4.step


def test_what_was_done_before_all_were_lost_counts() -> None:
    bench = concluded()
    left(bench, 0)
    bench.send(ProcessLost(member(0), ProcessEnded()))
    assert only(EndRun, bench.send(ProcessLost(member(1), ProcessEnded()))).status == "completed"


def test_an_error_behind_the_loop_fails_the_run() -> None:
    bench = concluded()
    said = bench.send(Raised(member(0), 4, -1, "OSError: no space", "trace"))
    assert only(EndRun, said).status == "failed"
    assert "behind the loop" in only(EndRun, said).reason and "no space" in only(EndRun, said).reason


def test_code_behind_the_loop_has_a_limit() -> None:
    bench = concluded()
    left(bench, 0)
    end = only(EndRun, bench.after(bench.settings.timeouts.finish_s + 1.0))
    assert end.status == "failed" and "timeouts.finish_s" in end.reason and "1.0" in end.reason


@pytest.mark.parametrize("reported", [True, False])
def test_a_coordinator_that_dies_meanwhile_goes_on_from_there(reported: bool) -> None:
    bench = concluded()
    bench.restart()
    for slot in range(2):
        bench.send(*([Finished(member(slot), 1, STEP_4, "digest", True)] if reported else []))
    assert not left(bench, 0)
    left(bench, 1)
    bench.through(bench.settings.timeouts.node_s + 1.0)
    assert bench.machine.state.ending.record is not None and bench.machine.state.ending.record.status == "completed"
    assert bench.machine.state.ending.record.digest == "digest"


def test_different_final_states_are_a_failure() -> None:
    bench = Bench(world=2).start(STEP_3)
    bench.send(Finished(member(0), 1, STEP_4, "one"))
    assert "different states" in only(EndRun, bench.send(Finished(member(1), 1, STEP_4, "other"))).reason


def test_late_comers_are_released_after_the_end() -> None:
    bench = concluded(1)
    left(bench, 0)
    said = bench.join(0, "late")
    assert only(Welcome, said).incarnation == 1
    assert only(Release, said).members == (member(0, 1),)
    bench.now_s += bench.settings.timeouts.resend_s
    assert only(Release, bench.send(Ready(member(0, 1)))).members == (member(0, 1),)


def test_words_that_waited_while_the_coordinator_stood_still_are_answered_once() -> None:
    bench = concluded(2)
    left(bench, 0)
    left(bench, 1)
    bench.now_s += bench.settings.timeouts.resend_s
    said = [bench.send(Ready(member(slot))) for _ in range(50) for slot in (0, 1)]
    assert [only(Release, one).members for one in said if one] == [(member(0),), (member(1),)]


def test_who_has_finished_in_a_view_that_the_journal_lost_has_not_finished_the_present_one() -> None:
    """It says so until it is answered; found by the simulated run of seed 862."""
    bench = Bench().start(STEP_3)
    for _ in range(2):
        bench.send(Finished(member(0), 7, STEP_4, "digest"))
    assert not bench.machine.state.attendance.finished
    bench.machine.state.validate()


# ---- a loop ends the run -----------------------------------------------------------------------------------------------------------------


def by_loop(slot: int, why: str = "flat") -> Finished:
    return Finished(member(slot), 1, STEP_4, "digest", ended=why)


def test_who_has_not_come_there_is_told_where_the_run_ends_and_again_until_it_waits() -> None:
    bench = Bench(world=3).start(STEP_3)
    said = bench.send(by_loop(1))
    assert only(EndAt, said) == EndAt((member(0), member(2)), STEP_4, member(1), "flat")
    (word,) = [record for record in bench.of(DecisionMade) if record.payload == LoopEnded(0, 4, (1, 0))]
    assert (word.policy, word.action, word.reason) == ("ending", "end", "flat")
    assert not [one for one in bench.send(by_loop(0)) if isinstance(one, EndAt)], "it was said just now"
    assert only(EndAt, bench.after(bench.settings.timeouts.resend_s)).members == (member(2),)


def ended_by_loop(bench: Bench) -> list[Instruction]:
    """All wait behind step 4, which is kept, and leave the code behind the loop."""
    bench.send(CheckpointDurable("c4", STEP_4, 2, 0.1, 0.2))
    assert only(Conclude, bench.send(by_loop(0), by_loop(1, "as flat"))).members == (member(0), member(1))
    return left(bench, 0, 1)


def test_the_run_is_completed_with_the_first_reason() -> None:
    end = only(EndRun, ended_by_loop(Bench(world=2).start(STEP_3)))
    assert (end.status, end.why, end.reason) == ("completed", EndWhy.LOOP_ENDED, "its loop ended it behind step 4: flat")


def test_a_store_that_fails_leaves_it_completed_and_not_saved() -> None:
    bench = Bench(world=1).start(STEP_3)
    said = bench.send(by_loop(0))
    for _ in range(60):
        for save in [one for one in said if isinstance(one, SaveCheckpoint)]:
            said = bench.send(PartFailed(member(0), save.request, "disk full"))
        said = bench.after(1.0)
        if any(isinstance(one, Conclude) for one in bench.said):
            break
    end = only(EndRun, left(bench, 0))
    assert end.status == "completed, not saved" and "behind step 4: flat, and the final checkpoint could not be kept" in end.reason


def test_a_coordinator_that_died_knows_that_the_loop_has_ended_the_run() -> None:
    bench = Bench(world=2).start(STEP_3)
    bench.send(by_loop(1))
    bench.restart()
    order = bench.machine.state.ending.order
    assert order is not None and (order.state, order.by, order.reason) == (STEP_4, member(1), "flat")


def test_a_history_that_begins_at_that_step_is_over_there_still_and_an_older_one_is_not() -> None:
    for step, kept in ((4, True), (3, False)):
        bench = Bench(world=1).start(STEP_3)
        bench.send(CheckpointDurable(f"c{step}", StateId(0, step), 1, 0.1, 0.2), by_loop(0))
        bench.send(ProcessLost(member(0), ProcessEnded()))
        bench.join(0, "again")
        bench.send(Ready(member(0, 1)))
        bench.after(1.0)
        order = bench.machine.state.ending.order
        assert (order.state if order is not None else None) == (StateId(1, 4) if kept else None)
        bench.restart()
        again = bench.machine.state.ending.order
        assert (again.state if again is not None else None) == (StateId(1, 4) if kept else None)
