"""The cores of two threads: one works for some milliseconds beside another that computes, on a machine where all cores compute.

The kernel puts a thread that wakes onto an idle core if it knows one near by. It looks for other cores only at some of its ticks. In a
virtual machine that does not know which cores share a cache there is no core near by. There a thread that copied for 35 ms shared the core
of the loop for up to 13 ms. The other core was idle meanwhile: the loop's helpers had done their half and waited for the loop. The copying
thread had also pushed the loop and its helper onto one core. After its end they shared that core for 9 to 11 ms beside an idle one.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from fleet.host.linux import allow_cores, allowed_cores
from fleet.host.proc import stat_fields

WAITS = 0.1
"""A thread that waits longer than this part of the time for a core shares that core with another thread."""


class Glance(NamedTuple):
    """The state of a thread: its core's number, whether it wants to run, and its total times on a core and in wait for one."""

    core: int
    wants: bool
    ran_ns: int
    waited_ns: int


class BesideThread:
    """The calling thread works beside thread ``other`` of this process. It keeps a core for itself, and hands that over at its end.

    Nothing changes where ``other`` may run on one core only, and on systems other than Linux.
    """

    def __init__(self, other: int) -> None:
        self._own, self._other = threading.get_native_id(), other
        self._before: tuple[Glance, Glance] | None = None

    def keep(self) -> bool:
        """At the begin of the work: send ``other`` to another core if it waits for this one. Returns whether it was sent."""
        try:
            own, other = self._before = _glance(self._own), _glance(self._other)
            return other.wants and own.core == other.core and _send(self._other, allowed_cores(self._other) - {own.core})
        except OSError:  # a thread has ended, the kernel does not allow it, or there is no /proc
            return False

    def leave(self) -> bool:
        """At the end of the work: send ``other`` to this core if it shared its own and no thread wants this one. Whether it was sent."""
        try:
            now = _glance(self._own), _glance(self._other)
            return self._before is not None and _is_left(self._before, now) and _send(self._other, {now[0].core})
        except OSError:  # as above
            return False


def _is_left(before: tuple[Glance, Glance], now: tuple[Glance, Glance]) -> bool:
    own_ns, other_ns = (then.waited_ns - first.waited_ns for first, then in zip(before, now, strict=True))
    worked_ns = now[0].ran_ns - before[0].ran_ns + own_ns
    return now[0].core != now[1].core and own_ns < WAITS * worked_ns < other_ns


def _glance(thread: int) -> Glance:
    """proc_pid_stat(5), fields 3 and 39, of one thread; ``schedstat`` begins with its times on a core and in a core's queue."""
    fields = stat_fields(thread)
    ran_ns, waited_ns = map(int, Path(f"/proc/{thread}/schedstat").read_text(encoding="utf-8").split()[:2])
    return Glance(int(fields[36]), fields[0] == "R", ran_ns, waited_ns)


def _send(thread: int, cores: Set[int]) -> bool:
    """Send the thread to one of ``cores``, if it may run there. Afterwards it may run on the same cores as before."""
    allowed = allowed_cores(thread)
    if not allowed & cores:
        return False
    allow_cores(thread, allowed & cores)
    allow_cores(thread, allowed)
    return True
