"""A disk that somebody else fills up, or a folder that is deleted, while a run goes on: it is named, and nothing committed is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.causes import EndWhy
from fleet.protocol.records import Committed, DecisionMade, ProcessLost, RunEnded
from fleet.settings.run import CheckpointSettings, RunSettings
from storage.checkpoint.store import CheckpointStore
from tests.fault.test_bad_luck import of, settings
from tests.support import long_loops, trains
from tests.support.disks import small_disk
from tests.support.journals import durable
from tests.support.plain import PlainFleet
from tests.support.undisturbed import Undisturbed

pytestmark = pytest.mark.timeout(240)
MOMENTS, FIRST = 20, int(os.environ.get("FLEET_FIRST_MOMENT", "0"))
STEPS = 40


class Disk:
    """A small filesystem of its own that somebody else fills up, and that has room again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"

    def fill(self) -> None:
        with open(self._ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def make_room(self) -> None:
        self._ballast.unlink()

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", 32) as folder:
        yield Disk(folder)


@pytest.fixture(scope="session")
def truth(undisturbed: Undisturbed) -> str:
    return undisturbed(lambda folder: chosen(folder, world=1))


def chosen(folder: Path, **changes: Any) -> RunSettings:
    often = CheckpointSettings(policy="fixed", interval_s=0.5)
    return settings(folder, **({"world": 2, "checkpoint": often, "peer_copies": 0, "options": {"steps": str(STEPS)}} | changes))


def ended(fleet: PlainFleet) -> tuple[RunEnded, list[Any]]:
    fleet.wait(60.0)
    records = fleet.records()
    [end] = of(RunEnded, records)
    return end, records


def goes_on(run: RunSettings, folder: Path, url: str) -> str:
    """The final digest of the run that goes on from its newest checkpoint."""
    store = CheckpointStore(url)
    name = store.newest_valid()
    assert name is not None
    with PlainFleet(trains.plain, run, folder, url=url, begin=(name, store.manifest(name).state)) as fleet:
        assert fleet.wait().status == "completed"
        return str(fleet.coordinator.machine.state.ending.record.digest)


def test_a_journal_that_cannot_grow_ends_the_run_in_order_and_its_last_commit_is_kept(disk: Disk, tmp_path: Path, truth: str) -> None:
    run, url = chosen(tmp_path, options={"steps": str(STEPS), "pause_s": "0.2"}), f"file://{tmp_path}/store"
    (disk.folder / "run").mkdir()
    with PlainFleet(trains.plain, run, disk.folder / "run", url=url) as fleet:
        fleet.wait_for(lambda: fleet.step >= 3)
        disk.fill()
        grow(fleet)
        end, records = ended(fleet)
    assert (end.status, end.why) == ("failed", EndWhy.JOURNAL_FAILED)
    assert f"{disk.folder}/run/journal.jsonl cannot grow: [Errno 28] No space left on device" in end.reason and "Make room" in end.reason
    assert durable(records)[-1].state == max(record.state for record in of(Committed, records)) and not of(ProcessLost, records)
    disk.make_room()
    assert goes_on(chosen(tmp_path), tmp_path, url) == truth


def grow(fleet: PlainFleet) -> None:
    """Use up what is held behind the journal's last line, but for what its end takes, as hours of training would."""

    async def write() -> None:
        while not fleet.journal.trouble:
            for number in range(100):
                fleet.journal.append(DecisionMade("test", "wait", f"{number} {'x' * 60}", None, 0.0))
            fleet.journal.flush()

    fleet.call(write())


def test_a_run_whose_folder_is_deleted_ends_by_name(tmp_path: Path) -> None:
    run, home = chosen(tmp_path, options={"steps": "1000000"}), tmp_path / "home"
    home.mkdir()
    with PlainFleet(trains.plain, run, home, url=f"file://{tmp_path}/store") as fleet:
        fleet.wait_for(lambda: fleet.step >= 3)
        shutil.rmtree(home)
        outcome = fleet.wait(60.0)
        last = fleet.step
    assert (outcome.status, outcome.why) == ("failed", EndWhy.JOURNAL_FAILED)
    assert f"{home}/journal.jsonl is gone" in outcome.reason
    store = CheckpointStore(f"file://{tmp_path}/store")
    assert store.manifest(store.newest_valid() or "").state.step == last, "what was trained is kept where checkpoints lie"


def test_output_without_end_leaves_room_for_the_run_which_goes_on(disk: Disk, tmp_path: Path) -> None:
    run = chosen(tmp_path, options={"steps": str(STEPS)})
    (disk.folder / "run").mkdir()
    with PlainFleet(long_loops.prints_much, run, disk.folder / "run") as fleet:
        assert fleet.wait().status == "completed"
        records = fleet.records()
    reported = [record for record in of(DecisionMade, records) if record.policy == "output"]
    assert reported and "bytes that rank" in reported[0].reason and "little of the disk is left" in reported[0].reason
    assert disk.free_bytes > 4 << 20
    assert not of(ProcessLost, records)
    assert durable(records)[-1].state.step == STEPS


@pytest.mark.parametrize("number", range(MOMENTS))
def test_at_a_random_moment_nothing_that_is_committed_is_lost(disk: Disk, tmp_path: Path, truth: str, number: int) -> None:
    """Journal, store or logs are on the disk that is full; room is made after a while, or when the run has ended."""
    rng = random.Random(f"full {FIRST + number}")
    what, at, again_s = ("journal", "store", "logs")[number % 3], rng.randrange(1, STEPS - 8), rng.uniform(0.5, 4.0)
    run = chosen(tmp_path, options={"steps": str(STEPS), "pause_s": "0.1"})
    run = dataclasses.replace(run, timeouts=dataclasses.replace(run.timeouts, store_s=1.0))
    home = disk.folder / "run" if what != "store" else tmp_path / "home"
    home.mkdir()
    url = f"file://{disk.folder if what == 'store' else tmp_path}/store"
    with PlainFleet(long_loops.prints_much if what == "logs" else trains.plain, run, home, url=url) as fleet:
        fleet.wait_for(lambda: fleet.step >= at)
        disk.fill()
        if what == "journal":
            grow(fleet)
        else:
            fleet.wait_for(lambda: fleet.step >= at + 4 or fleet.ended.done())
            fleet.call(pause(again_s))
            disk.make_room()
        end, records = ended(fleet)
    last = max(record.state for record in of(Committed, records))
    assert durable(records)[-1].state == last and not of(ProcessLost, records)
    if what == "journal":
        disk.make_room()
        assert end.why is EndWhy.JOURNAL_FAILED
        assert goes_on(chosen(tmp_path), tmp_path, url) == truth
    else:
        assert (end.status, end.digest) == ("completed", truth)


async def pause(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)
