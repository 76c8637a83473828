"""A filesystem without room: what fills it, what is refused, and what is left of it by whoever is killed."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rank.telemetry.recorder import CAPACITY, Recorder
from chaos import ballast, daemons
from chaos.daemons import MAY_FILL, Daemons
from fleet.protocol.operations import HEAL, START, STORE, Operation
from tests.support.disks import small_disk
from tests.support.processes import children_of
from tests.support.waiting import until

SIZE = 8 << 20


def order(kind: str, phase: str = START) -> Operation:
    return Operation("f", kind, phase, None, STORE, 60.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of eight mebibytes."""
    with small_disk(tmp_path / "disk", SIZE >> 20) as folder:
        yield folder


@pytest.fixture
def own(disk: Path) -> Iterator[Daemons]:
    own = Daemons(f"file://{disk}/runs/one")
    yield own
    own.close()


def has_room(folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as probe:
        try:
            os.posix_fallocate(probe.fileno(), 0, 8192)
        except OSError as error:
            return error.errno != errno.ENOSPC
    return True


def test_a_store_has_no_room_until_it_is_healed(own: Daemons, disk: Path) -> None:
    (disk / "runs").mkdir()
    (disk / MAY_FILL).touch()
    assert own.operate(order("store_full")) is None
    assert not has_room(disk) and {each.name for each in disk.iterdir()} == {"runs", MAY_FILL}, "nobody sees what fills it"
    own.operate(order("store_full", HEAL))
    assert has_room(disk) and os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize > SIZE // 2


def test_nobodys_disk_is_filled_unasked(own: Daemons, disk: Path) -> None:
    refused = own.operate(order("store_full")) or ""
    assert f"{disk} may hold more than the store" in refused and MAY_FILL in refused and has_room(disk)
    assert "the store is no folder" in (Daemons("s3://bucket/runs").operate(order("store_full")) or "")


def test_memory_of_files_is_filled_where_that_is_little(own: Daemons, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "SHARED", disk)
    assert own.operate(order("shm_full")) is None
    assert not has_room(disk)
    own.operate(order("shm_full", HEAL))
    monkeypatch.setattr(daemons, "SHARED_MOST_BYTES", SIZE // 2)
    refused = own.operate(order("shm_full")) or ""
    assert "bytes are free in" in refused and "takes no more than" in refused and has_room(disk)


def test_the_kernel_frees_it_when_who_fills_is_killed(own: Daemons, disk: Path) -> None:
    (disk / MAY_FILL).touch()
    assert own.operate(order("store_full")) is None
    [filler] = children_of(ballast.__file__)
    filler.kill()
    until(lambda: has_room(disk), "there is room again", 10, tick_s=0.05)


def test_a_rank_that_runs_has_its_memory_and_another_does_not_begin(own: Daemons, disk: Path) -> None:
    """A page that is missing later would end its process by SIGBUS."""
    (disk / MAY_FILL).touch()
    recorder = Recorder(disk / "ring", 0)
    path = disk / "ring"
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    assert own.operate(order("store_full")) is None
    with pytest.raises(OSError, match="No space left"):
        Recorder(disk / "another", 0)
    for number in range(CAPACITY - 1):
        recorder.switch("cx"[number % 2], number + 1)
