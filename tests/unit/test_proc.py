"""What the kernel says of a real child."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from actors.rank.telemetry.stacks import STACKS_SIGNAL
from fleet.host.proc import core_wait_us, handles

BOUND_S = 20.0
DEEP = f"""
import faulthandler, os, sys, threading
faulthandler.register({int(STACKS_SIGNAL)}, file=1, all_threads=True)
def deep(n):
    deep(n - 1) if n else threading.Event().wait()
for _ in range(40):
    threading.Thread(target=deep, args=(90,), daemon=True).start()
os.write(2, b"ready\\n")
deep(5)
"""
"""Its stacks are more than a pipe holds."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", DEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stderr is not None
        started.stderr.readline()
        os.set_blocking(started.stdout.fileno(), False)
        yield started
        started.kill()


def test_a_process_handles_a_signal_until_all_stacks_are_written(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    assert not handles(child.pid, STACKS_SIGNAL)
    child.send_signal(STACKS_SIGNAL)
    time.sleep(0.1)
    assert handles(child.pid, STACKS_SIGNAL), "nobody reads: the pipe is full before the last stack, and a pause is not the end"
    text = b""
    while handles(child.pid, STACKS_SIGNAL):
        text += child.stdout.read() or b""
    text += child.stdout.read() or b""
    assert text.count(b"Thread 0x") == 40
    assert text.rstrip().endswith(b"in <module>")
    child.kill()
    child.wait(BOUND_S)
    assert not handles(child.pid, STACKS_SIGNAL), "it is gone"


def test_what_a_process_waits_for_a_core_grows_and_is_nothing_once_it_is_gone(child: subprocess.Popen[bytes]) -> None:
    assert core_wait_us(os.getpid()) <= core_wait_us(os.getpid())
    child.kill()
    child.wait(BOUND_S)
    assert core_wait_us(child.pid) == 0
