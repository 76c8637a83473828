"""Which core is whose, where a thread works for some milliseconds beside another one that computes with all cores.

The kernel puts a thread that wakes onto an idle core if it knows one near by, and looks for others only at some of its ticks. In a virtual
machine that does not know which cores have a cache in common there is none near by. There a thread that copied for 35 ms was seen to share
the core of the loop for up to 13 ms while the other core was idle, as the loop's helpers had done their half and waited for it. And when it
was done, the loop and its helper, which it had pushed onto one core, went on to share that for 9 to 11 ms beside an idle one.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from fleet.host.linux import allow_cores, allowed_cores
from fleet.host.proc import stat_fields

WAITS = 0.1
"""Who waits longer than this part of the time for a core shares it with another."""


class Glance(NamedTuple):
    """Where a thread is: the number of its core, whether it wants to run, and for how long it has run and has waited for a core in all."""

    core: int
    wants: bool
    ran_ns: int
    waited_ns: int


class BesideThread:
    """The calling thread works beside ``other`` of this process: it keeps a core for itself, and leaves it when it is done.

    Nothing is changed where ``other`` may run on one core only, and on systems other than Linux.
    """

    def __init__(self, other: int) -> None:
        self._own, self._other = threading.get_native_id(), other
        self._before: tuple[Glance, Glance] | None = None

    def keep(self) -> bool:
        """Work has begun: ``other``, if it waits for this core, is sent to one of the others. Whether it was."""
        try:
            own, other = self._before = _glance(self._own), _glance(self._other)
            return other.wants and own.core == other.core and _send(self._other, allowed_cores(self._other) - {own.core})
        except OSError:  # one of them has ended, the kernel does not let us, or there is no /proc
            return False

    def leave(self) -> bool:
        """Work is done: ``other`` goes on here, if it has had to share its core with a third and nobody else wants this one. Whether so."""
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
    """proc_pid_stat(5), fields 3 and 39, of one thread; ``schedstat`` begins with the times on a core and on the queue of one."""
    fields = stat_fields(thread)
    ran_ns, waited_ns = map(int, Path(f"/proc/{thread}/schedstat").read_text(encoding="utf-8").split()[:2])
    return Glance(int(fields[36]), fields[0] == "R", ran_ns, waited_ns)


def _send(thread: int, cores: Set[int]) -> bool:
    """To one of these cores, if it may run there; afterwards it may run wherever it might before."""
    allowed = allowed_cores(thread)
    if not allowed & cores:
        return False
    allow_cores(thread, allowed & cores)
    allow_cores(thread, allowed)
    return True
