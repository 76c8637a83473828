"""A journal that cannot be written, or is gone: what was recorded comes before what follows from it, and the run ends by name."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.driver import LOOK_S, Driver
from fleet.host import linux
from fleet.host.journal import ROOM_BYTES, JournalWriter, read_journal
from fleet.machine import stopping
from fleet.protocol.causes import Departure, EndWhy, ProcessEnded
from fleet.protocol.events import CheckpointDurable, Heartbeat, Quiesced, StopRequested, Tick
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import Conclude, EndRun, Halt, Instruction, Keep, Propose, Publish, Release
from fleet.protocol.records import VERSION, Committed, Record, RunEnded, RunStarted
from fleet.protocol.types import Pulse, StateId
from tests.unit.test_machine import STEP_3, Bench, member

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
HOLD_ROOM = "fleet.host.journal.hold_room"
FIRST = RunStarted(VERSION, "run", 0.0, 1.0e9, 2, 0, 16, "{}")


class Clock:
    """It stands where it was put."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class Journal:
    """In memory; from ``fails_from`` on nothing more can be written."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.trouble, self.fails = "", False

    def append(self, record: Record) -> None:
        if self.fails:
            raise FULL
        self.records.append(record)

    def flush(self) -> None:
        if self.fails:
            raise FULL


class Run:
    """A machine whose two ranks train, and what its driver has said."""

    def __init__(self) -> None:
        self.bench, self.clock, self.journal = Bench(world=2).start(STEP_3), Clock(), Journal()
        self.clock.at_s = self.bench.now_s
        self.said: list[Instruction] = []
        self.ended: list[EndRun] = []
        self.driver = Driver(self.bench.machine, self.clock, self.journal, self, None, self.ended.append)  # type: ignore[arg-type]

    def send(self, instruction: Instruction) -> None:
        self.said.append(instruction)

    def tick(self, seconds: float) -> None:
        """As the driver's own loop does, once."""

        async def once() -> None:
            ticking = asyncio.create_task(self.driver.tick_forever())
            await asyncio.sleep(0)
            ticking.cancel()

        self.clock.at_s += seconds
        asyncio.run(once())

    def quiesce(self, slot: int) -> None:
        generation = self.bench.machine.state.assembly.generation
        self.driver.submit(Quiesced(member(slot), generation, STEP_3, False, Departure.CALLED))
        self.driver.submit(Tick())

    def wait_out(self) -> None:
        """Until ranks are waited for no longer, with a tick all the time."""
        until_s = self.clock.at_s + stopping.patience_s(self.bench.machine.state) + 0.1
        while self.clock.at_s < until_s:
            self.clock.at_s += 0.5
            pulse = Pulse(member(0), self.bench.machine.state.assembly.generation, STEP_3, 0.0, 0.0)
            self.driver.submit(Heartbeat("n0", (pulse,)))
            self.driver.submit(Tick())

    def kinds(self) -> list[type]:
        return [type(one) for one in self.said]


def test_after_a_record_that_cannot_be_written_no_view_is_published_and_the_run_stops_in_order_by_name() -> None:
    run = Run()
    run.journal.fails = True
    run.driver.submit(ProcessLost(member(1), ProcessEnded(), at_s=run.clock.at_s))
    reported = run.bench.machine.state.ending.stopping
    assert reported is not None and reported.why is EndWhy.JOURNAL_FAILED
    run.quiesce(0)
    assert run.bench.machine.state.view is not None and len(run.bench.machine.state.view.members) == 1, "there would be one"
    assert not {Publish, Propose, Conclude} & set(run.kinds())
    run.wait_out()
    run.quiesce(0)
    assert Keep in run.kinds(), "what was trained is kept all the same"
    run.driver.submit(CheckpointDurable("kept", STEP_3, 1, 0.0, 0.2))
    [end] = run.ended
    assert (end.status, end.why) == ("failed", EndWhy.JOURNAL_FAILED)
    assert "[Errno 28] No space left on device" in end.reason and "fleet run --resume" in end.reason
    assert Release in run.kinds(), "ranks are not left behind"


def test_an_end_that_cannot_be_written_is_told_as_a_failure() -> None:
    run = Run()
    run.driver.submit(StopRequested("enough"))
    run.journal.fails = True
    run.driver.submit(StopRequested("Ray Train ended", "ControllerError"))
    [end] = run.ended
    assert end.status == "failed" and "No space left" in end.reason


def test_records_that_could_not_be_written_are_once_there_is_room() -> None:
    run = Run()
    run.journal.fails = True
    assert not run.driver.write(lambda: run.journal.append(FIRST)), "an agent is not told that its spans are kept"
    run.journal.fails = False
    run.driver.submit(StopRequested("Ray Train ended", "ControllerError"))
    assert run.ended[0].reason == "Ray Train ended"


def test_a_journal_in_trouble_stops_the_run_in_order_while_its_end_can_still_be_written() -> None:
    run = Run()
    run.journal.trouble = "/runs/one/journal.jsonl cannot grow: [Errno 28] No space left on device"
    run.tick(LOOK_S / 2)
    assert Halt not in run.kinds(), "it is looked at now and then"
    run.tick(LOOK_S)
    assert Halt in run.kinds() and not run.ended
    reported = run.bench.machine.state.ending.stopping
    assert reported is not None and reported.why is EndWhy.JOURNAL_FAILED
    assert reported.reason.startswith(run.journal.trouble) and "Make room" in reported.reason


# ---- the file ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    made = JournalWriter(tmp_path / "run" / "journal.jsonl", flush_interval_s=0.0)
    made.append(FIRST)
    yield made
    made.close()


def steps(writer: JournalWriter, first: int, last: int) -> None:
    for number in range(first, last):
        writer.append(Committed(StateId(0, number), float(number)))
    writer.flush()


def test_room_behind_the_last_line_is_held_and_let_go(writer: JournalWriter) -> None:
    steps(writer, 0, 10)
    held_bytes = os.stat(writer.path).st_blocks * 512
    assert held_bytes >= os.stat(writer.path).st_size + ROOM_BYTES
    assert len(list(read_journal(writer.path))) == 11, "readers see the lines alone"
    writer.close()
    assert os.stat(writer.path).st_blocks * 512 < ROOM_BYTES


def test_a_disk_that_gives_no_more_room_is_told_before_anything_is_lost(writer: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size_bytes: int) -> bool:
        raise FULL

    assert not writer.trouble
    monkeypatch.setattr(HOLD_ROOM, full)
    steps(writer, 0, 120_000)
    assert writer.trouble == f"{writer.path} cannot grow: [Errno 28] No space left on device"
    writer.append(RunEnded("failed", "full", 1.0, "", ""))
    writer.flush()
    assert isinstance(list(read_journal(writer.path))[-1], RunEnded)
    monkeypatch.setattr(HOLD_ROOM, linux.hold_room)
    writer.flush()
    assert not writer.trouble, "room was made"


def test_a_filesystem_that_cannot_hold_room_is_written_as_any(writer: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HOLD_ROOM, lambda descriptor, start, size_bytes: False)
    steps(writer, 0, 120_000)
    assert not writer.trouble


def moved(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def replaced(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.parametrize(
    ("harm", "words"),
    [(Path.unlink, "is gone"), (lambda path: shutil.rmtree(path.parent), "is gone"), (moved, "is gone"), (replaced, "replaced")],
    ids=["file", "folder", "moved", "replaced"],
)
def test_a_journal_that_is_deleted_while_it_is_written_is_noticed(
    writer: JournalWriter, harm: Callable[[Path], object], words: str
) -> None:
    harm(writer.path)
    assert words in writer.trouble and str(writer.path) in writer.trouble
