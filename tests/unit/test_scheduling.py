"""A thread that asks for short slices gets them, and hands them on only where it shall."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.host.scheduling import (
    LAST,
    NICE,
    NICE_SLICE_US,
    SLICE_US,
    STEADY_SLICE_US,
    be_ordinary,
    be_prompt,
    be_steady,
    bow_out,
    give_way,
)


def slice_us() -> float:
    """Of the calling thread, as the kernel tells it."""
    found = re.search(r"se\.slice\s*:\s*(\d+)", Path("/proc/thread-self/sched").read_text())
    return int(found[1]) / 1e3 if found else -1.0


def in_a_thread(fn: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def reported(children: bool) -> tuple[bool, float, float, int]:
    """(what the kernel said, own slice, slice of a thread that was started afterwards, niceness)."""
    taken = be_prompt(children=children)
    return taken, slice_us(), in_a_thread(slice_us), os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("children", [True, False])
def test_a_thread_gets_the_slice_that_it_asks_for(children: bool) -> None:
    before, niceness = slice_us(), os.getpriority(os.PRIO_PROCESS, 0)
    taken, mine, childs, nice_after = in_a_thread(lambda: reported(children))
    assert nice_after == niceness
    if not taken:  # a kernel before 6.12: nothing has changed
        assert mine == childs == before
        return
    if before >= 0:  # the kernel says what it does
        assert mine == SLICE_US
        assert (childs == SLICE_US) == children
    assert slice_us() == before


def test_who_computes_runs_for_long_until_it_is_told_otherwise_and_what_it_starts_does_not() -> None:
    """Told by another thread, as a rank's loop is by the one that hears of a loss."""
    before, niceness = slice_us(), os.getpriority(os.PRIO_PROCESS, 0)

    def compute() -> list[Any]:
        mine = threading.get_native_id()
        steady = [be_steady(mine), slice_us(), in_a_thread(slice_us)]
        ordinary = [in_a_thread(lambda: be_ordinary(mine)), slice_us()]
        return [*steady, *ordinary, os.getpriority(os.PRIO_PROCESS, 0)]

    taken, steady, childs, reported, after, nice_after = in_a_thread(compute)
    assert nice_after == niceness and reported == taken
    assert before < 0 or steady == (STEADY_SLICE_US if taken else before)
    assert childs == after == before == slice_us()


def test_who_gives_way_is_nicer_and_runs_for_short() -> None:
    before, niceness = slice_us(), os.getpriority(os.PRIO_PROCESS, 0)
    taken, mine, nice_after = in_a_thread(lambda: (give_way(), slice_us(), os.getpriority(os.PRIO_PROCESS, 0)))
    assert nice_after == min(19, niceness + NICE) and os.getpriority(os.PRIO_PROCESS, 0) == niceness
    assert before < 0 or mine == (NICE_SLICE_US if taken else before)


SLEEPS_TWICE = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print('.', flush=True); time.sleep(60)"


NO_THREAD = str((1 << 22) + 1)
"""Beyond the largest number that Linux gives to a thread."""


def test_all_threads_of_a_process_that_ends_let_others_go_first_and_any_may_be_gone_already(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPS_TWICE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        threads = os.listdir(f"/proc/{process.pid}/task")
        assert len(threads) == 2
        monkeypatch.setattr(os, "listdir", lambda path: [NO_THREAD, *threads])
        bow_out(process.pid)
        monkeypatch.undo()
        assert {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads} == {LAST}
        process.kill()
    bow_out(process.pid)


def test_a_thread_of_another_class_is_left_alone() -> None:
    code = "import os; from fleet.host.scheduling import be_prompt; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); "
    code += "print(be_prompt(children=True), os.sched_getscheduler(0) == os.SCHED_BATCH)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "True"]
