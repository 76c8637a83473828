"""How a stop in order goes, as the coordinator sees it: ranks halt, what they hold is kept, the run ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fleet.machine import stopping
from fleet.protocol.causes import Departure, EndWhy, Engaged, ProcessEnded
from fleet.protocol.events import CheckpointDurable, Finished, PartFailed, PartWritten, Quiesced, StopRequested
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import CommitCheckpoint, EndRun, Halt, Instruction, Keep, Quiesce, SaveCheckpoint
from fleet.protocol.records import Committed
from fleet.protocol.types import Part, StateId
from fleet.settings.run import Timeouts
from tests.unit.test_machine import START, STEP_3, STEP_4, Bench, member, only
from tests.unit.test_machine_ending import concluded, left


def halted(bench: Bench) -> list[Instruction]:
    """Both ranks wait behind step 4; what is said then."""
    return bench.send(*(Finished(member(slot), 1, STEP_4, "digest", halted=True) for slot in range(2)))


def test_a_stop_halts_the_ranks_and_waits_for_their_checkpoint() -> None:
    bench = Bench(world=2).start(STEP_3)
    assert only(Halt, bench.send(StopRequested("enough"))).members == (member(0), member(1))
    assert only(Halt, bench.after(1.0)).generation == 1, "said again until they wait"
    save = only(SaveCheckpoint, halted(bench))
    assert bench.of(Committed)[-1].state == STEP_4
    parts = [PartWritten(member(slot), save.request, "c4", STEP_4, Part(f"p{slot}", 1, "", (slot,)), 0.1) for slot in range(2)]
    order = only(CommitCheckpoint, bench.send(*parts))
    assert [part.name for part in order.parts] == ["p0", "p1"]
    said = bench.send(CheckpointDurable("c4", STEP_4, 2, 0.1, 0.2))
    assert only(EndRun, said) == EndRun("stopped", "enough", "", EndWhy.STOPPED)


def test_a_stop_with_an_error_is_a_failure_at_once() -> None:
    bench = Bench(world=2).start(STEP_3)
    assert only(EndRun, bench.send(StopRequested("Ray Train ended", "ControllerError"))).status == "failed"


def test_a_stop_of_ranks_that_hold_what_is_kept_ends_at_once() -> None:
    bench = Bench(world=2, interval_s=1.0).start(STEP_3)
    only(SaveCheckpoint, bench.after(1.5))
    bench.send(StopRequested("enough"))
    bench.send(CheckpointDurable("c4", STEP_4, 2, 0.1, 0.2))
    assert only(EndRun, halted(bench)).why is EndWhy.STOPPED


def test_a_stop_keeps_the_step_that_its_ranks_have_just_told_of() -> None:
    """The checkpoint of the step before is durable, and the word of the later one is what the coordinator has just heard."""
    bench = Bench(world=2, interval_s=1.0).start(STEP_3)
    bench.after(1.5)
    bench.send(CheckpointDurable("c3", STEP_3, 2, 0.1, 0.2))
    bench.send(StopRequested("enough"))
    said = halted(bench)
    assert not [one for one in said if isinstance(one, EndRun)]
    only(SaveCheckpoint, said)
    assert bench.of(Committed)[-1].state == STEP_4


def late(world: int = 2, **settings: Any) -> Bench:
    """The run was told to stop, and its ranks have not come to the end of step 3 as long as the grace allows: they are called out."""
    bench = Bench(world=world, **settings).start(STEP_3)
    bench.send(StopRequested("enough"))
    patience_s = stopping.patience_s(bench.machine.state)
    assert 0.0 < patience_s < bench.settings.timeouts.grace_s
    assert not [one for one in bench.through(patience_s - 0.1) if isinstance(one, Quiesce | EndRun)], "a long step is waited for"
    order = only(Quiesce, bench.after(0.2))
    assert order.members == tuple(member(slot) for slot in range(world)) and not order.in_person
    return bench


def out(
    bench: Bench, slot: int, state: StateId | None = STEP_3, engaged: Engaged = Engaged.COMPUTES, dirty: bool = False
) -> list[Instruction]:
    return bench.send(Quiesced(member(slot), bench.machine.state.assembly.generation, state, dirty, Departure.CALLED, engaged=engaged))


def wrote(bench: Bench, order: Keep, slot: int) -> list[Instruction]:
    part = Part(f"p{slot}", 1, "", (order.members.index(member(slot)),))
    return bench.send(PartWritten(member(slot), order.request, "kept", order.state, part, 0.0))


def test_a_store_that_fails_is_not_waited_for_once_the_grace_allows_no_more() -> None:
    bench = Bench(world=2).start(STEP_3)
    bench.send(StopRequested("enough"))
    save = only(SaveCheckpoint, halted(bench))
    late_s = stopping.write_s(bench.machine.state) + 0.1
    assert not [one for one in bench.through(late_s) if isinstance(one, EndRun)], "it is being written"
    assert only(EndRun, bench.send(PartFailed(member(0), save.request, "the disk is full"))).status == "stopped"


def test_behind_a_failure_the_ranks_of_a_new_view_are_asked_at_once() -> None:
    bench = Bench(world=2).start(STEP_3)
    bench.send(StopRequested("enough"))
    save = only(SaveCheckpoint, halted(bench))
    said = bench.send(PartFailed(member(0), save.request, "the disk is full"))
    assert not [one for one in said if isinstance(one, SaveCheckpoint)], "the same ranks are asked again later"
    view, store = bench.machine.state.view, bench.machine.state.checkpoints.store
    assert view is not None
    assert store.keep_final(view, bench.now_s) == ([], False)
    said, _ = store.keep_final(dataclasses.replace(view, generation=view.generation + 1), bench.now_s)
    assert only(SaveCheckpoint, said).generation == view.generation + 1


def test_ranks_that_do_not_come_in_time_write_what_they_hold_beside_their_loops() -> None:
    """A backward of a minute in all of them: step 3 is what they hold, and none of it is durable."""
    bench = late()
    assert not out(bench, 0)
    order = only(Keep, out(bench, 1))
    assert order.members == (member(0), member(1)) and order.state == STEP_3
    wrote(bench, order, 0)
    commit = only(CommitCheckpoint, wrote(bench, order, 1))
    assert [part.name for part in commit.parts] == ["p0", "p1"]
    said = bench.send(CheckpointDurable("kept", STEP_3, 2, 0.0, 0.2))
    assert only(EndRun, said) == EndRun("stopped", "enough", "", EndWhy.STOPPED)


def test_who_waits_writes_for_who_evaluates() -> None:
    bench = late()
    out(bench, 0, engaged=Engaged.ALONE)
    order = only(Keep, out(bench, 1, engaged=Engaged.WAITS))
    assert order.members == (member(1),)
    assert len(only(CommitCheckpoint, wrote(bench, order, 1)).parts) == 1


def test_a_step_that_one_rank_alone_has_taken_is_kept() -> None:
    bench = late()
    out(bench, 0)
    order = only(Keep, out(bench, 1, STEP_4))
    assert (order.members, order.state) == ((member(1),), STEP_4)
    assert not bench.of(Committed) or bench.of(Committed)[-1].state == STEP_3, "the other has not taken it"


def test_what_is_half_changed_is_not_kept() -> None:
    bench = late()
    out(bench, 0, STEP_4, dirty=True)
    assert only(Keep, out(bench, 1)).members == (member(1),)


def test_who_does_not_answer_is_not_waited_for() -> None:
    bench = late()
    assert not out(bench, 1)
    assert only(Keep, bench.after(stopping.ANSWER_S + 0.1, 0)).members == (member(1),)


def test_when_nobody_answers_the_run_ends_all_the_same() -> None:
    bench = late()
    assert only(EndRun, bench.after(stopping.ANSWER_S + 0.1)).status == "stopped"


def test_another_one_writes_when_the_first_cannot_or_is_lost() -> None:
    bench = late(world=3)
    out(bench, 0, engaged=Engaged.WAITS)
    out(bench, 1)
    first = only(Keep, out(bench, 2))
    assert first.members == (member(0),)
    second = only(Keep, bench.send(PartFailed(member(0), first.request, "it has changed something")))
    assert second.members == (member(1), member(2)) and second.generation > first.generation, "parts of two tries are not mixed"
    third = only(Keep, bench.send(ProcessLost(member(1), ProcessEnded(), at_s=bench.now_s)))
    assert third.members == (member(2),)
    only(CommitCheckpoint, wrote(bench, third, 2))
    assert only(EndRun, bench.send(CheckpointDurable("kept", STEP_3, 1, 0.0, 0.2))).status == "stopped"


def test_when_none_can_write_the_run_ends_without() -> None:
    bench = late()
    out(bench, 0)
    order = only(Keep, out(bench, 1))
    order = only(Keep, bench.send(PartFailed(member(0), order.request, "the disk is full")))
    assert only(EndRun, bench.send(PartFailed(member(1), order.request, "the disk is full"))).status == "stopped"


def test_what_is_durable_already_is_not_written_again() -> None:
    bench = Bench(world=1, interval_s=1.0).start(STEP_3)
    bench.after(1.5)
    bench.send(CheckpointDurable("c3", STEP_3, 1, 0.1, 0.2), StopRequested("enough"))
    bench.through(stopping.patience_s(bench.machine.state) + 0.1)
    said = out(bench, 0)
    assert not [one for one in said if isinstance(one, Keep)]
    only(EndRun, said)


def test_a_state_that_is_spread_is_written_by_all_or_by_none() -> None:
    bench = late(optimizer_sharding="zero1")
    out(bench, 0, engaged=Engaged.WAITS)
    assert only(Keep, out(bench, 1)).members == (member(0), member(1))
    bench = late(optimizer_sharding="zero1")
    out(bench, 0)
    only(EndRun, bench.send(ProcessLost(member(1), ProcessEnded(), at_s=bench.now_s)))


def test_a_first_step_that_does_not_end_has_nothing_to_keep() -> None:
    bench = Bench(world=2).start()
    bench.send(StopRequested("enough"))
    bench.through(stopping.patience_s(bench.machine.state) + 0.1)
    out(bench, 0, START)
    out(bench, 1, START)
    assert only(EndRun, bench.said).status == "stopped" and not [one for one in bench.said if isinstance(one, Keep)]


def test_a_short_grace_leaves_no_time_for_steps_and_a_slow_store_less() -> None:
    bench = Bench(world=1, timeouts=Timeouts(grace_s=5.0)).start(STEP_3)
    assert stopping.patience_s(bench.machine.state) == 0.0
    bench = Bench(world=1).start(STEP_3)
    before_s = stopping.patience_s(bench.machine.state)
    bench.send(CheckpointDurable("c3", STEP_3, 1, 0.1, 4.0))
    assert stopping.patience_s(bench.machine.state) == before_s - 6.0


@pytest.mark.parametrize("why", [EndWhy.PAUSED, EndWhy.BUDGET_SPENT, EndWhy.TIME_IS_UP, EndWhy.STORE_FAILED])
def test_each_stop_keeps_what_is_held(why: EndWhy) -> None:
    bench = Bench(world=1).start(STEP_3)
    bench.send(StopRequested("enough", why=why))
    bench.through(stopping.patience_s(bench.machine.state) + 0.1)
    order = only(Keep, out(bench, 0))
    wrote(bench, order, 0)
    assert only(EndRun, bench.send(CheckpointDurable("kept", STEP_3, 1, 0.0, 0.2))).why is why


def test_ranks_that_halted_for_a_coordinator_whose_journal_lost_it_do_not_complete_the_run() -> None:
    bench = Bench(world=2).start(STEP_3)
    save = only(SaveCheckpoint, halted(bench))
    parts = [PartWritten(member(slot), save.request, "c4", STEP_4, Part(f"p{slot}", 1, "", (slot,)), 0.1) for slot in range(2)]
    bench.send(*parts)
    assert only(EndRun, bench.send(CheckpointDurable("c4", STEP_4, 2, 0.1, 0.2))).status == "stopped"


def test_code_behind_the_loop_is_waited_for_and_then_the_run_is_completed() -> None:
    """Its last state is kept already; what the train function writes there is worth some seconds."""
    bench = concluded()
    bench.send(StopRequested("enough"))
    bench.through(stopping.patience_s(bench.machine.state) - 0.5)
    assert not [one for one in bench.said if isinstance(one, EndRun)]
    left(bench, 0, 1)
    assert only(EndRun, bench.said).status == "completed"
    bench = concluded()
    bench.send(StopRequested("enough"))
    bench.through(stopping.patience_s(bench.machine.state) + 0.1)
    assert only(EndRun, bench.said).status == "stopped"
