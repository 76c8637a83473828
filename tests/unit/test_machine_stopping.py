"""How a stop in order goes, as the coordinator sees it: ranks halt, what they hold is kept, the run ends."""

from __future__ import annotations

from fleet.protocol.causes import EndWhy
from fleet.protocol.events import CheckpointDurable, Finished, PartFailed, PartWritten, StopRequested
from fleet.protocol.instructions import CommitCheckpoint, EndRun, Halt, Instruction, SaveCheckpoint
from fleet.protocol.records import Committed
from fleet.protocol.types import Part
from tests.unit.test_machine import STEP_3, STEP_4, Bench, member, only


def halted(bench: Bench) -> list[Instruction]:
    """Both ranks wait behind step 4; what is said then."""
    return bench.tell(*(Finished(member(slot), 1, STEP_4, "digest", halted=True) for slot in range(2)))


def test_a_stop_halts_the_ranks_and_waits_for_their_checkpoint() -> None:
    bench = Bench(world=2).start(STEP_3)
    assert only(Halt, bench.tell(StopRequested("enough"))).members == (member(0), member(1))
    assert only(Halt, bench.after(1.0)).generation == 1, "said again until they wait"
    save = only(SaveCheckpoint, halted(bench))
    assert bench.of(Committed)[-1].state == STEP_4
    parts = [PartWritten(member(slot), save.request, "c4", STEP_4, Part(f"p{slot}", 1, "", (slot,)), 0.1) for slot in range(2)]
    order = only(CommitCheckpoint, bench.tell(*parts))
    assert [part.name for part in order.parts] == ["p0", "p1"]
    said = bench.tell(CheckpointDurable("c4", STEP_4, 2, 0.1, 0.2))
    assert only(EndRun, said) == EndRun("stopped", "enough", "", EndWhy.STOPPED)


def test_a_stop_with_an_error_is_a_failure_at_once() -> None:
    bench = Bench(world=2).start(STEP_3)
    assert only(EndRun, bench.tell(StopRequested("Ray Train ended", "ControllerError"))).status == "failed"


def test_a_stop_of_ranks_that_hold_what_is_kept_ends_at_once() -> None:
    bench = Bench(world=2, interval_s=1.0).start(STEP_3)
    only(SaveCheckpoint, bench.after(1.5))
    bench.tell(StopRequested("enough"))
    bench.tell(CheckpointDurable("c4", STEP_4, 2, 0.1, 0.2))
    assert only(EndRun, halted(bench)).why is EndWhy.STOPPED


def test_a_stop_keeps_the_step_that_its_ranks_have_just_told_of() -> None:
    """The checkpoint of the step before is durable, and the word of the later one is what the coordinator has just heard."""
    bench = Bench(world=2, interval_s=1.0).start(STEP_3)
    bench.after(1.5)
    bench.tell(CheckpointDurable("c3", STEP_3, 2, 0.1, 0.2))
    bench.tell(StopRequested("enough"))
    said = halted(bench)
    assert not [one for one in said if isinstance(one, EndRun)]
    only(SaveCheckpoint, said)
    assert bench.of(Committed)[-1].state == STEP_4


def test_a_stop_is_not_waited_for_when_ranks_come_to_no_end_of_their_step_or_the_store_fails() -> None:
    bench = Bench(world=2).start(STEP_3)
    bench.tell(StopRequested("enough"))
    limit_s = bench.machine.state.settings.timeouts.park_s
    assert not [one for one in bench.after(limit_s - 0.5) if isinstance(one, EndRun)]
    assert only(EndRun, bench.after(1.0)).status == "stopped"
    bench = Bench(world=2).start(STEP_3)
    bench.tell(StopRequested("enough"))
    save = only(SaveCheckpoint, halted(bench))
    assert not [one for one in bench.after(limit_s + 1.0) if isinstance(one, EndRun)], "it is being written"
    assert only(EndRun, bench.tell(PartFailed(member(0), save.request, "the disk is full"))).status == "stopped"


def test_ranks_that_halted_for_a_coordinator_whose_journal_lost_it_do_not_complete_the_run() -> None:
    bench = Bench(world=2).start(STEP_3)
    save = only(SaveCheckpoint, halted(bench))
    parts = [PartWritten(member(slot), save.request, "c4", STEP_4, Part(f"p{slot}", 1, "", (slot,)), 0.1) for slot in range(2)]
    bench.tell(*parts)
    assert only(EndRun, bench.tell(CheckpointDurable("c4", STEP_4, 2, 0.1, 0.2))).status == "stopped"
