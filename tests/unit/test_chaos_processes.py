"""Real signals to real children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.processes import LocalProcesses
from fleet.host.proc import start_ticks
from fleet.protocol.types import Process
from tests.support.injected import this_process

BOUND_S = 20.0
COUNT = "import sys\nn = 0\nwhile True:\n    n += 1\n    if n % 200_000 == 0: print(n, flush=True)\n"


@pytest.fixture
def processes() -> Iterator[LocalProcesses]:
    port = LocalProcesses("here")
    yield port
    port.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-c", COUNT], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    started.stdout.readline()
    yield started
    started.kill()
    started.wait(BOUND_S)
    started.stdout.close()


def stopped(child: subprocess.Popen[str]) -> bool:
    """Waits for the next change between stopped and running of a child, and says which it was."""
    _, status = os.waitpid(child.pid, os.WUNTRACED | os.WCONTINUED)
    return os.WIFSTOPPED(status)


def test_stop_resume_and_kill(processes: LocalProcesses, child: subprocess.Popen[str]) -> None:
    target = this_process(child.pid, "here")
    assert processes.stop(target) is None
    assert stopped(child)
    assert processes.resume(target) is None
    assert not stopped(child)
    assert processes.stop(target) is None
    assert stopped(child)
    assert processes.kill(target) is None, "SIGKILL ends a stopped process too"
    assert child.wait(BOUND_S) == -signal.SIGKILL


@pytest.mark.parametrize("call", ["kill", "stop", "resume", "slow"])
def test_refuses_a_process_that_is_not_the_one_named(processes: LocalProcesses, child: subprocess.Popen[str], call: str) -> None:
    target = this_process(child.pid, "here")
    more = (2.0, 1.0) if call == "slow" else ()
    act = getattr(processes, call)
    reused = act(replace(target, start_ticks=target.start_ticks - 1), *more)
    assert f"not {target.start_ticks - 1}" in reused
    elsewhere = act(replace(target, node="there"), *more)
    assert "node there" in elsewhere
    assert child.stdout is not None
    assert child.stdout.readline(), "it runs on"
    child.kill()
    child.wait(BOUND_S)
    assert "rocess" in act(target, *more), "and one that is gone is refused too"


def test_slowdown_stops_and_continues_it_in_turn(processes: LocalProcesses, child: subprocess.Popen[str]) -> None:
    assert processes.slow(this_process(child.pid, "here"), 4.0, 3600.0) is None
    for _ in range(3):
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)


def test_slowdown_ends_by_itself_and_leaves_it_running(processes: LocalProcesses, child: subprocess.Popen[str]) -> None:
    assert processes.slow(this_process(child.pid, "here"), 4.0, 0.2) is None
    wait_for_slowdowns()
    assert state(child) != "T"
    assert child.stdout is not None
    assert child.stdout.readline()


@pytest.mark.parametrize("call", ["resume", "close"])
def test_a_slowdown_can_be_ended(processes: LocalProcesses, child: subprocess.Popen[str], call: str) -> None:
    target = this_process(child.pid, "here")
    processes.slow(target, 50.0, 3600.0)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    processes.close() if call == "close" else processes.resume(target)
    wait_for_slowdowns()
    assert state(child) != "T"


def test_stop_during_a_slowdown_stays(processes: LocalProcesses, child: subprocess.Popen[str]) -> None:
    target = this_process(child.pid, "here")
    processes.slow(target, 2.0, 3600.0)
    assert processes.stop(target) is None
    wait_for_slowdowns()
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert state(child) == "T"
    processes.close()
    assert state(child) != "T", "close leaves nothing stopped"


def test_slowdown_of_a_process_that_dies_ends(processes: LocalProcesses, child: subprocess.Popen[str]) -> None:
    processes.slow(this_process(child.pid, "here"), 2.0, 3600.0)
    child.kill()
    child.wait(BOUND_S)
    wait_for_slowdowns()


def test_severity_below_one_is_refused(processes: LocalProcesses, child: subprocess.Popen[str]) -> None:
    assert "no slowdown" in (processes.slow(this_process(child.pid, "here"), 0.5, 1.0) or "")


def test_nothing_stays_stopped_when_the_interpreter_ends(child: subprocess.Popen[str]) -> None:
    code = (
        "from chaos.processes import LocalProcesses\nfrom tests.support.injected import this_process\n"
        f"port = LocalProcesses('here'); assert port.stop(this_process({child.pid}, 'here')) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=BOUND_S)
    assert state(child) != "T"


def test_start_ticks_reads_past_a_name_with_brackets_and_spaces() -> None:
    code = "import sys\nopen('/proc/self/comm', 'w').write(') 1 (x')\nprint('up', flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as odd:
        assert odd.stdout is not None
        odd.stdout.readline()
        assert start_ticks(os.getpid()) <= start_ticks(odd.pid) < 2**62
        assert odd.communicate(timeout=BOUND_S)
    with pytest.raises(ProcessLookupError):
        this_process(odd.pid, "here")


def state(child: subprocess.Popen[str]) -> str:
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    return stat[stat.rindex(")") + 2]


def wait_for_slowdowns() -> None:
    for thread in threading.enumerate():
        if thread.name == "slowdown":
            thread.join(BOUND_S)
            assert not thread.is_alive()


def test_process_is_value() -> None:
    assert this_process(os.getpid(), "n") == Process("n", os.getpid(), start_ticks(os.getpid()))
