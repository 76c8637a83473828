"""How a process ended, as its node's agent comes to know it: what who started it says, and whom the kernel killed for memory."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.memory_kills import MemoryKills, kills, memory_groups
from fleet.protocol.causes import ProcessEnded
from fleet.protocol.facts import LossExplained
from fleet.protocol.types import Member
from tests.support.agents import agent_of

PID = 42


def counted(folder: Path, count: int, name: str = "memory.events") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {count}\noom_group_kill 9\n")


def proc(folder: Path, groups: str, pid: int = PID) -> Path:
    (folder / "proc" / str(pid)).mkdir(parents=True, exist_ok=True)
    (folder / "proc" / str(pid) / "cgroup").write_text(groups)
    return folder / "proc"


def test_the_group_of_a_process_is_found_in_both_versions(tmp_path: Path) -> None:
    counted(tmp_path / "job" / "rank", 1)
    counted(tmp_path, 5)
    assert kills(memory_groups("0::/job/rank\n", tmp_path)) == 1
    assert kills(memory_groups("0::/of/the/host\n", tmp_path)) == 5, "a container sees its own group as the root"
    counted(tmp_path / "memory" / "job", 2, "memory.oom_control")
    assert kills(memory_groups("3:cpu,cpuacct:/x\n9:memory:/job\n", tmp_path)) == 2
    assert kills(memory_groups("3:cpu:/x\n", tmp_path)) is None and kills([tmp_path / "gone"]) is None


def test_each_kill_that_is_counted_explains_one_death(tmp_path: Path) -> None:
    counted(tmp_path, 5)
    watched = MemoryKills(tmp_path, proc(tmp_path, "0::/\n"))
    for pid in (PID, 43, 44):
        proc(tmp_path, "0::/\n", pid)
        watched.watch(pid)
    assert not watched.killed(PID), "killed, and the kernel has counted nothing"
    counted(tmp_path, 6)
    assert watched.killed(43) and not watched.killed(44)
    assert not watched.killed(45), "nobody watched it"


@pytest.mark.parametrize(
    ("status", "oom", "ended"),
    [
        (-signal.SIGKILL, 0, ProcessEnded(-9)),
        (-signal.SIGKILL, 1, ProcessEnded(-9, out_of_memory=True)),
        (-signal.SIGSEGV, 1, ProcessEnded(-11)),
        (3, 0, ProcessEnded(3)),
        (None, 1, None),
    ],
)
def test_the_agent_tells_how_a_process_ended_once_that_is_known(
    status: int | None, oom: int, ended: ProcessEnded | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.node.LOOK_S", 0.001)
    monkeypatch.setattr("actors.node.EXPLAIN_S", 0.01)
    counted(tmp_path, 5)

    async def reported() -> list[Any]:
        agent, received = agent_of("n0", 0, tmp_path, "127.0.0.1:1"), list[Any]()
        agent._kills = MemoryKills(tmp_path, proc(tmp_path, "0::/\n"))
        agent._kills.watch(PID)
        counted(tmp_path, 5 + oom)
        if status is not None:
            (tmp_path / f"exit-{PID}").write_text(str(status))
        monkeypatch.setattr(type(agent._up), "send", lambda self, *messages: received.extend(messages))
        await agent._explain(Member(1, 0), PID)
        return received

    assert asyncio.run(reported()) == ([LossExplained(Member(1, 0), ended)] if ended is not None else [])
