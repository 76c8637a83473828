"""A part of a core for a process: in either version of cgroup, and with the kernel's own where this machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.confine import sweep
from fleet.app import quota
from fleet.app.quota import Quotas, cpu_part, limit
from fleet.errors import ConfigError
from fleet.host import processor_time
from fleet.host.processor_time import cores_of_host, cpu_group, own_group
from tests.support.waiting import until

FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us", "cgroup.procs"), 2: ("cpu.max", "cgroup.procs")}
GROUPS = {1: ("9:name=systemd:/x\n4:cpu,cpuacct:/job/a\n0::/\n", "cpu/job/a"), 2: ("0::/job/a\n", "job/a")}
SPINS = "print('spins', flush=True)\nwhile True: pass"


def files(folder: Path, version: int) -> Path:
    """A group as the kernel shows it."""
    for name in FILES[version]:
        (folder / name).write_text("-1" if name == "cpu.cfs_quota_us" else "max 100000" if name == "cpu.max" else "100000")
    (folder / "cgroup.procs").write_text("")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_is_found_and_bounded_in_both_versions(tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reported, inside = GROUPS[version]
    (tmp_path / inside).mkdir(parents=True)
    files(tmp_path / inside, version)
    parent = cpu_group(reported, tmp_path)
    assert parent == tmp_path / inside
    right = Path.mkdir

    def mkdir(self: Path, *arguments: Any, **more: Any) -> None:  # the kernel puts the files there
        right(self, *arguments, **more)
        files(self, version)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    group = cpu_part(parent, 0.2)
    found = [(group.folder / name).read_text() for name in FILES[version][:-1]]
    assert found == (["1000", "5000"] if version == 1 else ["1000 5000"])
    group.take(7)
    assert (group.folder / "cgroup.procs").read_text() == "7" and str(os.getpid()) in group.folder.name


@pytest.mark.parametrize(("version", "bound"), [(1, ("cpu.cfs_quota_us", "150000")), (2, ("cpu.max", "150000 100000"))])
def test_a_host_has_no_more_cores_than_its_group(
    tmp_path: Path, version: int, bound: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_time, "own_group", lambda: files(tmp_path, version))
    monkeypatch.setattr(processor_time, "allowed_cores", lambda thread: {0, 1, 2, 3})
    assert cores_of_host() == 4
    files(tmp_path, version)
    monkeypatch.setattr(processor_time, "own_group", lambda: tmp_path)
    (tmp_path / bound[0]).write_text(bound[1])
    assert cores_of_host() == 1.5


def test_parts_that_the_kernel_cannot_give_are_refused() -> None:
    assert [limit(cores) for cores in (0.05, 0.25, 2.0)] == [(1000, 20_000), (1250, 5000), (10_000, 5000)]
    for cores in (0.0, -1.0, 1e-9):
        with pytest.raises(ConfigError, match="--cpu-quota"):
            limit(cores)


def test_where_groups_have_no_limit_it_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="have no limit of CPU time"):
        cpu_part(tmp_path, 0.2)
    monkeypatch.setattr(quota, "own_group", lambda: tmp_path)
    with pytest.raises(ConfigError, match="no process can be given a part of a core here"):
        Quotas(0.2)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="in no group that bounds CPU time"):
        cpu_group("9:name=systemd:/x\n", tmp_path)


def test_what_a_process_has_left_is_swept_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {f"fleet-cpu-{gone.pid}-abc", f"fleet-cpu-{os.getpid()}-abc", "fleet-cpu-like", "other"}
    for name in names:
        (tmp_path / name).mkdir()
    sweep(tmp_path, quota.PREFIX)
    assert {path.name for path in tmp_path.iterdir()} == names - {f"fleet-cpu-{gone.pid}-abc"}


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SPINS], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def able() -> bool:
    """Whether a group can be made and bounded here, by the kernel's word alone."""
    try:
        folder = own_group() / "fleet-able"
        folder.mkdir()
    except OSError:
        return False
    bounded = any((folder / name).exists() for name in ("cpu.max", "cpu.cfs_quota_us"))
    folder.rmdir()
    return bounded


def waited(folder: Path) -> int:
    """In how many periods the group had used up its part."""
    return int(dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())["nr_throttled"])


def test_a_process_with_a_part_of_a_core_is_made_to_wait_and_has_all_of_it_again(spinning: subprocess.Popen[str]) -> None:
    assert spinning.stdout is not None and spinning.stdout.readline() == "spins\n"
    if not able():  # there are no such groups here, and whoever asks is told
        with pytest.raises(ConfigError, match="--cpu-quota"):
            Quotas(0.1)
        return
    quotas = Quotas(0.1)
    parent, before = own_group(), Path(f"/proc/{spinning.pid}/cgroup").read_text()
    quotas.hold(spinning.pid)
    (folder,) = parent.glob(f"{quota.PREFIX}{os.getpid()}-*")
    assert (folder / "cgroup.procs").read_text().split() == [str(spinning.pid)]
    until(lambda: waited(folder) > 3, "a process that has to wait for its next period")
    quotas.close()
    assert not folder.exists() and Path(f"/proc/{spinning.pid}/cgroup").read_text() == before
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        quotas.hold(gone.pid)
    quotas.close()
    assert list(parent.glob(f"{quota.PREFIX}{os.getpid()}-*")) == []
