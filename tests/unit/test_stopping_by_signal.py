"""A signal stops a run though the main thread is in a call that does not come back; a second one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.app.stopping import KILLED, SIGNALS, stopped_by_signals

BODY = """
import ctypes, threading, time
from fleet.app.stopping import stopped_by_signals

with stopped_by_signals(lambda name: print("stop", name, flush=True), lambda words: print(words, flush=True)):
    threading.Timer(0.5, print, ("ready",), {{"flush": True}}).start()
    {call}
"""
IN_C = "m = ctypes.create_string_buffer(64); [ctypes.CDLL(None).pthread_mutex_lock(m) for _ in range(2)]"
"""The second one waits for the first, and no signal ends that."""
IN_PYTHON = "[time.sleep(1) for _ in range(60)]"
BOTH_AT_ONCE = """
import ctypes, sys, threading, time
from fleet.app.stopping import stopped_by_signals

lock, handled, of_c = ctypes.create_string_buffer(64), threading.Event(), ctypes.CDLL(None)

def release(words):
    print(words, flush=True)
    sys.stdin.readline()
    of_c.pthread_mutex_unlock(lock)
    handled.wait()

with stopped_by_signals(lambda name: None, release):
    threading.Timer(0.5, print, ("ready",), {"flush": True}).start()
    for _ in range(2):
        of_c.pthread_mutex_lock(lock)
    handled.set()
    [time.sleep(1) for _ in range(60)]
"""
"""The main thread is in a call until the test says that both signals are there; only then the listening thread goes on."""


@pytest.mark.parametrize(("call", "code"), [(IN_C, KILLED + signal.SIGTERM), (IN_PYTHON, -signal.SIGTERM)], ids=["C", "Python"])
def test_the_first_stops_the_run_at_once_and_the_second_ends_the_process(call: str, code: int) -> None:
    command = [sys.executable, "-c", BODY.format(call=call)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "SIGTERM: stopping in order; once more to stop at once\n"
        assert process.stdout.readline() == "stop SIGTERM\n"
        process.terminate()
        assert process.wait(30) == code


def test_a_second_one_counts_though_the_main_thread_takes_both_at_once() -> None:
    """Its call goes on until both are there, and the thread that listens comes to the second one behind the handlers."""
    with subprocess.Popen(
        [sys.executable, "-c", BOTH_AT_ONCE], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "SIGTERM: stopping in order; once more to stop at once\n"
        process.terminate()
        print("both are there", file=process.stdin, flush=True)
        assert process.wait(30) == -signal.SIGTERM


def test_afterwards_signals_do_what_they_did_before() -> None:
    before, stopped = [signal.getsignal(each) for each in SIGNALS], list[str]()
    with stopped_by_signals(stopped.append, lambda words: None):
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is not None
    assert stopped == ["SIGINT"] and [signal.getsignal(each) for each in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
