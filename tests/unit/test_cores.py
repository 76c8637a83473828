"""Who works beside the loop keeps a core for itself, and leaves it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fleet.host.cores as cores_module
from fleet.host.cores import BesideThread, Glance
from tests.support.waiting import until

MS = 1_000_000
HERE, THERE = 0, 1


@contextmanager
def computing() -> Iterator[int]:
    """A thread that wants a core all the time, without the interpreter's lock: by its number."""
    over, started = threading.Event(), threading.Event()
    numbers: list[int] = []
    block = bytes(1 << 20)

    def compute() -> None:
        numbers.append(threading.get_native_id())
        started.set()
        while not over.is_set():
            hashlib.sha256(block)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert started.wait(30)
        yield numbers[0]
    finally:
        over.set()
        thread.join()


def glances(monkeypatch: pytest.MonkeyPatch, own: list[Glance], other: list[Glance]) -> None:
    left = {threading.get_native_id(): iter(own)}
    rest = iter(other)
    monkeypatch.setattr(cores_module, "_glance", lambda thread: next(left.get(thread, rest)))


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[int]]]:
    """The cores that threads are sent to, on a machine of two."""
    calls: list[set[int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda thread: {HERE, THERE})
        patch.setattr(os, "sched_setaffinity", lambda thread, cores: calls.append(set(cores)))
        yield calls


@pytest.mark.parametrize(
    ("other", "sent"),
    [
        (Glance(HERE, True, 0, 0), True),
        (Glance(HERE, False, 0, 0), False),  # it waits for something else
        (Glance(THERE, True, 0, 0), False),
    ],
)
def test_who_waits_for_this_core_is_sent_to_another(other: Glance, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    glances(monkeypatch, [Glance(HERE, True, 0, 0)], [other])
    with asked(monkeypatch) as calls:
        assert BesideThread(1).keep() == sent
    assert calls == ([{THERE}, {HERE, THERE}] if sent else [])


@pytest.mark.parametrize(
    ("own", "other", "left"),
    [
        (Glance(HERE, True, 10 * MS, 0), Glance(THERE, True, 5 * MS, 4 * MS), True),
        (Glance(HERE, True, 10 * MS, 0), Glance(THERE, False, 5 * MS, 4 * MS), True),  # it waits for its helper at this moment
        (Glance(HERE, True, 5 * MS, 5 * MS), Glance(THERE, True, 5 * MS, 4 * MS), False),  # this core is wanted
        (Glance(HERE, True, 10 * MS, 0), Glance(THERE, True, 9 * MS, 0), False),  # it has its core to itself
        (Glance(HERE, True, 10 * MS, 0), Glance(HERE, True, 5 * MS, 4 * MS), False),  # it goes on here anyway
    ],
)
def test_a_core_is_left_to_who_shares_another(own: Glance, other: Glance, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    glances(monkeypatch, [Glance(HERE, True, 0, 0), own], [Glance(THERE, True, 0, 0), other])
    with asked(monkeypatch) as calls:
        beside = BesideThread(1)
        assert not beside.keep()
        assert beside.leave() == left
    assert calls == ([{HERE}, {HERE, THERE}] if left else [])


def test_nothing_is_left_by_who_has_not_looked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    glances(monkeypatch, [Glance(HERE, True, 10 * MS, 0)], [Glance(THERE, True, 5 * MS, 4 * MS)])
    assert not BesideThread(1).leave()


def test_who_is_sent_goes_there_and_may_go_anywhere_again() -> None:
    """As the kernel sees it, on a core that there is."""
    with computing() as other:
        before = os.sched_getaffinity(other)
        for core in before:
            assert cores_module._send(other, {core})
            assert os.sched_getaffinity(other) == before
        assert not cores_module._send(other, set())


def test_two_threads_that_are_pinned_to_one_core_are_seen_to_wait_for_it() -> None:
    """Real figures of the kernel: each of two that want one core waits for it half of the time."""
    core = min(os.sched_getaffinity(0))
    with computing() as one, computing() as two:
        for thread in (one, two):
            os.sched_setaffinity(thread, {core})
        before, until_s = cores_module._glance(one), time.monotonic() + 30
        while (now := cores_module._glance(one)).waited_ns - before.waited_ns < 20 * MS or now.core != core:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        assert now.ran_ns > before.ran_ns


def test_nothing_is_done_for_a_thread_that_has_ended() -> None:
    with computing() as other:
        beside = BesideThread(other)
        beside.keep()
    until(lambda: not Path(f"/proc/self/task/{other}").exists(), "the kernel has forgotten the thread, too")
    assert not beside.leave()
    assert not BesideThread(other).keep()


def test_a_thread_that_is_pinned_elsewhere_stays_there() -> None:
    with computing() as other:
        allowed = os.sched_getaffinity(other)
        os.sched_setaffinity(other, {min(allowed)})
        assert not cores_module._send(other, {max(allowed) + 1})
        assert os.sched_getaffinity(other) == {min(allowed)}
