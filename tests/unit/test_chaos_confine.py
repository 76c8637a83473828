"""A process without memory: in either version of cgroup, and with the kernel's own where this machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaos import confine
from chaos.confine import confined, memory_group, sweep
from chaos.daemons import Daemons
from fleet.protocol.operations import START, Operation
from tests.support.injected import this_process
from tests.support.waiting import until

TAKES = """
import sys
print("it waits", flush=True)
sys.stdin.readline()
taken = [bytes([1]) * (1 << 20) for _ in range(64)]
print("it was not killed")
"""


def folders(root: Path, limit: str, *names: str) -> Path:
    """Groups as the kernel shows them."""
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        for file in (limit, "cgroup.procs"):
            (root / name / file).write_text("")
    return root


@pytest.mark.parametrize(
    ("groups", "limit", "inside"),
    [
        ("9:name=systemd:/x\n4:memory:/job/a\n0::/\n", "memory.limit_in_bytes", "memory/job/a"),
        ("0::/job/a\n", "memory.max", "job/a"),
    ],
    ids=["version 1", "version 2"],
)
def test_the_group_is_found_and_given_no_memory_in_both_versions(
    tmp_path: Path, groups: str, limit: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = memory_group(groups, folders(tmp_path, limit, inside))
    assert parent == tmp_path / inside
    right = Path.mkdir

    def mkdir(self: Path, *arguments: Any, **more: Any) -> None:  # the kernel puts the files there
        right(self, *arguments, **more)
        for file in (limit, "cgroup.procs"):
            (self / file).write_text("")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    group = confined(parent)
    assert (group.folder / limit).read_text() == "0" and str(os.getpid()) in group.folder.name
    group.take(7)
    assert (group.folder / "cgroup.procs").read_text() == "7"


def test_where_groups_have_no_limit_it_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with pytest.raises(OSError, match="have no limit of memory"):
        confined(tmp_path / "job")
    assert list((tmp_path / "job").iterdir()) == []
    with pytest.raises(OSError, match="in no memory group"):
        memory_group("9:name=systemd:/x\n", tmp_path)


def test_what_a_program_has_left_is_swept_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {f"fleet-{gone.pid}-abc", f"fleet-{os.getpid()}-abc", "fleet-like", "other"}
    for name in names:
        (tmp_path / "job" / name).mkdir(parents=True)
    sweep(tmp_path / "job")
    assert {path.name for path in (tmp_path / "job").iterdir()} == names - {f"fleet-{gone.pid}-abc"}


@pytest.fixture
def target() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "it waits\n"  # one that still starts needs memory by itself
        yield process
        process.kill()


def able() -> str:
    """Why no process can be confined on this machine; empty where it can. Where it cannot, the order must be refused."""
    try:
        group = confined(memory_group(Path("/proc/self/cgroup").read_text()))
        group.close()
    except OSError as error:
        return str(error)
    return ""


def groups() -> list[Path]:
    """What children of this process have made. Tests of other processes make some at the same time."""
    makers = [child.pid for child in psutil.Process().children()]
    return [group for pid in makers for group in confine.ROOT.glob(f"**/{confine.PREFIX}{pid}-*")]


def test_the_kernel_kills_who_takes_memory_and_the_group_goes_with_it(target: subprocess.Popen[str]) -> None:
    own = Daemons()
    refused = own.operate(Operation("f", "out_of_memory", START, this_process(target.pid, "n")))
    assert bool(refused) == bool(able()), refused
    if refused:
        return
    (group,) = groups()
    said, _ = target.communicate("now\n", timeout=30)
    assert (target.returncode, said) == (-9, "")
    own.close()
    until(lambda: not group.exists(), "the kernel has let the group go")


def test_who_is_let_go_has_memory_again(target: subprocess.Popen[str]) -> None:
    own = Daemons()
    own.operate(Operation("f", "out_of_memory", START, this_process(target.pid, "n")))
    own.close()
    said, _ = target.communicate("now\n", timeout=30)
    assert (target.returncode, said) == (0, "it was not killed\n")
