"""What is done to a process that cannot do it to itself: by a child, a moment later, and undone when that is told to end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from chaos import daemons
from chaos.daemons import Daemons
from fleet.host import processes
from fleet.host.linux import allowed_cores
from fleet.protocol.operations import HEAL, START, Operation
from tests.support.waiting import until


@pytest.fixture
def target() -> Iterator[psutil.Popen]:
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    yield process
    if process.poll() is None:
        process.resume()
        process.kill()
        process.wait()


@pytest.fixture
def own() -> Iterator[Daemons]:
    daemons = Daemons()
    yield daemons
    daemons.close()


def order(kind: str, phase: str = START, duration_s: float = 60.0) -> Operation:
    return Operation("f", kind, phase, node=0, duration_s=duration_s)


def test_a_process_is_stopped_and_goes_on_when_it_is_healed(own: Daemons, target: psutil.Popen) -> None:
    assert own.signal_process(order("stop_agent"), lambda: target, "STOP") is None
    until(lambda: target.status() == psutil.STATUS_STOPPED, "it stands still", 10, tick_s=0.02)
    own.heal(order("stop_agent", HEAL))
    assert target.status() != psutil.STATUS_STOPPED
    own.heal(order("stop_agent", HEAL))


def test_a_stop_ends_by_itself(own: Daemons, target: psutil.Popen) -> None:
    assert own.signal_process(order("stop_agent", duration_s=0.5), lambda: target, "STOP") is None
    until(lambda: target.status() == psutil.STATUS_STOPPED, "it stands still", 10, tick_s=0.02)
    until(lambda: target.status() != psutil.STATUS_STOPPED, "it goes on", 10, tick_s=0.02)


def test_a_process_is_killed(own: Daemons, target: psutil.Popen) -> None:
    assert own.signal_process(order("kill_agent"), lambda: target, "KILL") is None
    assert target.wait(10) == -9


def test_who_has_ended_and_what_is_not_there_is_refused_in_words(own: Daemons, target: psutil.Popen) -> None:
    target.kill()
    target.wait()
    assert "No such process" in (own.signal_process(order("kill_agent"), lambda: target, "KILL") or "")
    for kind in ("stop_raylet", "stop_gcs", "kill_controller"):
        assert "no actor of Ray's" in (own.operate(order(kind)) or ""), "these tests run in no actor of Ray's"


def test_every_core_is_busy_until_it_is_healed_or_its_starter_is_gone(own: Daemons) -> None:
    others = set(psutil.Process().children())  # such as a fork server that another test has begun
    assert own.operate(order("busy_cores")) is None
    spinners = set(psutil.Process().children()) - others
    assert len(spinners) == len(allowed_cores())
    until(lambda: all(spinner.cpu_times().user > 0.1 for spinner in spinners), "they spin", 30, tick_s=0.05)
    own.close()
    assert not any(spinner.is_running() for spinner in spinners)
    code = f"""
import time
from chaos.daemons import Daemons
from fleet.protocol.operations import Operation
own = Daemons()
own.operate({order("busy_cores")!r})
print("begun", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == b"begun\n"
        left = psutil.Process(starter.pid).children()
        starter.kill()
    assert left and not psutil.wait_procs(left, timeout=20)[1]


def test_the_control_store_is_found_by_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters on one host: each has a store of its own."""
    pretended = "import sys, time; open('/proc/self/comm', 'w').write('gcs_server'); time.sleep(60)"
    both = [subprocess.Popen([sys.executable, "-c", pretended, f"--session-name={name}"]) for name in ("a", "b")]
    try:
        until(lambda: all(psutil.Process(each.pid).name() == "gcs_server" for each in both), "both are there", 10, tick_s=0.02)
        for name, mine in zip("ab", both, strict=True):
            raylet = type("Raylet", (), {"cmdline": lambda self, name=name: ["raylet", f"--session-name={name}"]})
            monkeypatch.setattr(daemons, "_ray_daemon", raylet)
            assert daemons._gcs().pid == mine.pid
    finally:
        for each in both:
            each.kill()
            each.wait()


def test_a_forked_actor_finds_what_its_daemon_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is a fork server. Other runs, and other clusters, have a controller on this host, too."""
    raylet = "import time; open('/proc/self/comm', 'w').write('raylet'); print(flush=True); time.sleep(60)"
    daemon = subprocess.Popen([sys.executable, "-c", raylet], stdout=subprocess.PIPE)
    title = f"{daemons.CONTROLLER}.run()"
    pretended = f"import time; print(flush=True); time.sleep(60) # {title}"
    marks = [("01000000", "1"), ("02000000", "1"), ("01000000", str(daemon.pid))]
    started = [
        subprocess.Popen(
            [title, "-c", pretended], executable=sys.executable, stdout=subprocess.PIPE,
            env={**os.environ, processes.JOB_VARIABLE: job, processes.RAYLET_VARIABLE: of},
        )
        for job, of in marks
    ]  # fmt: skip
    try:
        for each in (daemon, *started):
            assert each.stdout is not None and each.stdout.readline()
        monkeypatch.setenv(processes.JOB_VARIABLE, "01000000")
        monkeypatch.setenv(processes.RAYLET_VARIABLE, str(os.getpid()))
        with pytest.raises(LookupError, match="and not Ray's daemon"):
            daemons._ray_daemon()
        monkeypatch.setenv(processes.RAYLET_VARIABLE, str(daemon.pid))
        assert daemons._ray_daemon().pid == daemon.pid
        assert daemons._controller().pid == started[2].pid
        started[2].kill()
        started[2].wait()
        with pytest.raises(LookupError, match="is not on this host"):
            daemons._controller()
    finally:
        for each in (daemon, *started):
            each.kill()
            each.communicate()


def test_who_was_stopped_goes_on_when_the_one_who_ordered_it_is_killed(target: psutil.Popen) -> None:
    code = f"""
import os, time
import psutil
from chaos.daemons import Daemons
own = Daemons()
from fleet.protocol.operations import Operation
own.signal_process({order("stop_raylet")!r}, lambda: psutil.Process({target.pid}), "STOP")
print("begun", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == b"begun\n"
        until(lambda: target.status() == psutil.STATUS_STOPPED, "it stands still", 10, tick_s=0.02)
        [striker] = psutil.Process(starter.pid).children()
        starter.kill()
    until(lambda: target.status() != psutil.STATUS_STOPPED, "it goes on", 10, tick_s=0.02)
    assert not psutil.wait_procs([striker], timeout=10)[1]
