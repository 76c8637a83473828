"""A disk that is slow: how slow, what is refused, and what is left of it by whoever is killed. On a real block device."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos import brake
from chaos.daemons import MAY_FILL, Daemons
from fleet.protocol.operations import HEAL, START, STORE, Operation
from tests.support.disks import block_disk
from tests.support.processes import children_of
from tests.support.waiting import until

RATE = 4e6
SIZE = 4 << 20


def order(phase: str = START) -> Operation:
    return Operation("f", "disk_slow", phase, None, STORE, 60.0, bytes_per_s=RATE)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with block_disk(tmp_path_factory.mktemp("brake") / "disk", 64) as folder:
        (folder / MAY_FILL).touch()
        (folder / "runs").mkdir()
        yield folder


@pytest.fixture
def own(disk: Path) -> Iterator[Daemons]:
    own = Daemons(f"file://{disk}/runs/one")
    yield own
    own.close()
    assert not limit(disk)


def limit(disk: Path) -> int:
    return brake.limit_of(brake.device_of(disk), brake.LIMITS)


def written_s(disk: Path) -> float:
    begin_s = time.monotonic()
    with (disk / "written").open("wb") as sink:
        sink.write(os.urandom(SIZE))
        sink.flush()
        os.fsync(sink.fileno())
    return time.monotonic() - begin_s


def test_it_is_as_slow_as_asked_until_it_is_healed(own: Daemons, disk: Path) -> None:
    assert own.operate(order()) is None
    assert limit(disk) == RATE and written_s(disk) > 0.9 * SIZE / RATE
    assert own.operate(order(HEAL)) is None
    assert not limit(disk) and not (disk / brake.NOTE).exists() and not children_of(brake.__file__)


def test_two_do_not_slow_one_disk(own: Daemons, disk: Path) -> None:
    another = Daemons(f"file://{disk}/runs/two")
    assert own.operate(order()) is None
    assert "has a limit already" in (another.operate(order()) or "")
    another.close()
    assert limit(disk) == RATE


def test_it_ends_when_who_slows_it_is_killed(own: Daemons, disk: Path) -> None:
    assert own.operate(order()) is None
    [slower] = children_of(brake.__file__)
    slower.kill()
    until(lambda: not limit(disk), "its child has taken the limit off", 10, tick_s=0.05)


def test_when_both_are_killed_who_comes_next_takes_it_off(own: Daemons, disk: Path) -> None:
    assert own.operate(order()) is None
    [slower] = children_of(brake.__file__)
    [guard] = slower.children()
    guard.kill()
    slower.kill()
    slower.wait()
    assert limit(disk) == RATE
    Daemons(f"file://{disk}/runs/three").close()
    assert not limit(disk)


def test_nobodys_disk_is_slowed_unasked(tmp_path: Path) -> None:
    assert "may hold more than the store" in (Daemons(f"file://{tmp_path}/runs").operate(order()) or "")
    assert "the store is no folder" in (Daemons("s3://bucket/runs").operate(order()) or "")


def test_what_cannot_be_slowed_says_why(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cgroup version 1"):
        brake.Brake(tmp_path, 1000, tmp_path / "none")
    with pytest.raises(OSError, match="has no device of its own"):
        brake.device_of(Path("/proc"))
    done = subprocess.run(["python3", brake.__file__, "/proc", "1000", "1"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1 and "has no device of its own" in done.stdout
