"""Scheduling of threads: how soon a thread runs when it wakes, and how soon it lets others run.

A rank computes on all cores of its machine. The threads of a view change compete with that compute. They are a rank's thread that hears of
a loss, its thread that forms the next group, and the agents. Each message of a view change waits until a compute thread has used up its
slice of 3 or 4 ms. That happens some twenty times in a row. A thread that asks for a short slice has an earlier deadline. It may interrupt
a thread with a longer slice (Linux 6.12, ``sched_setattr``; EEVDF's latency request). It gets no greater share of the processor, and needs
no privilege.

A thread that only observes is nicer than that, and gets its share of the rest. But a nice thread that runs has its whole slice before a
rank that wakes gets the core back. So it asks for a short slice, too.

A thread that computes asks for a long slice. Where ranks share a core, each finds the other's data in its caches at every turn. With slices
of 20 ms a step of 115 ms took 4% less of the processor. The deadline of such a thread is late: a thread that wakes comes in between. During
a view change it asks for the kernel's own slice: otherwise it would wait for 20 ms of another rank's work before each answer.
"""

from __future__ import annotations

import contextlib
import os

from fleet.host.linux import RESET_ON_FORK, ask_slice, be_nicer, niceness, set_niceness

SLICE_US = 100
STEADY_SLICE_US = 20_000
KERNEL_SLICE_US = 0
"""The kernel's own."""
LAST = 19
NICE, NICE_SLICE_US = 10, 400
"""A nice thread's slice is so long that its deadline, at its small weight, is later than a compute thread's: it interrupts none of them."""


def be_prompt(*, children: bool) -> bool:
    """The calling thread runs soon when it wakes; with ``children`` also the threads and processes that it starts from now on.

    Returns False, without a change, where the kernel does not know the request, or the thread is of another scheduling class already.
    """
    return ask_slice(SLICE_US, niceness(), 0 if children else RESET_ON_FORK)


def be_steady(thread: int) -> bool:
    """``thread`` of this process runs for long at a time, unless a thread with a shorter slice wakes. Threads that it starts do not.

    Returns False, without a change, in the cases of :func:`be_prompt`.
    """
    return ask_slice(STEADY_SLICE_US, niceness(thread), RESET_ON_FORK, thread)


def be_ordinary(thread: int) -> bool:
    """``thread`` of this process takes turns as any other again, with the kernel's own slice. Returns as :func:`be_steady`."""
    return ask_slice(KERNEL_SLICE_US, niceness(thread), RESET_ON_FORK, thread)


def give_way() -> bool:
    """The calling thread, and those that it starts from now on, use spare processor time and give it back at once. Linux: only this thread.

    False where the kernel knows no slices; the thread is nicer there, too.
    """
    return ask_slice(NICE_SLICE_US, be_nicer(NICE), 0)


def bow_out(pid: int) -> None:
    """A killed process frees its memory at the lowest priority.

    For 470 MB that takes 50 ms of a core, just when the survivors compute the dead rank's shards. It sets the niceness, not the idle class:
    the process has to end on a machine that is never idle, too.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile; the last one frees the memory
            set_niceness(int(thread), LAST)
