"""How soon a thread runs when it wakes, and how soon it lets others run: for those that everyone waits for, and for those that only look.

A rank computes on all that its machine has, and the thread that hears of a loss, the one that forms the next group and the agents compete
with it: each message of a view change then waits until a compute thread has used up its slice of 3 or 4 ms, some twenty times in a row. A
thread that asks for a short slice has an earlier deadline and may interrupt one with a longer (Linux 6.12, ``sched_setattr``; EEVDF's
latency request). It gets no greater share of the processor, and needs no privilege.

Who only looks is nicer than that, and has its share of what is left. But a nice thread that runs has its whole slice before a rank that
wakes gets the core back; it asks for a short one, too.

Who computes asks for a long one. Where ranks share a core, each finds its caches full of another's data whenever they take turns; with
20 ms at a time a step of 115 ms took 4% less of the processor. Its deadline is late then, so that whoever wakes comes in between. While a
view changes it asks for no more than others, as it would wait for 20 ms of another rank's whenever it has an answer.
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
"""As long as that, so that its deadline, at its small weight, is later than that of whoever computes: it interrupts nobody."""


def be_prompt(*, children: bool) -> bool:
    """The calling thread runs soon when it wakes; with ``children`` also the threads and processes that it starts from now on.

    False, and nothing is changed, where the kernel knows no such request, or the thread is of another scheduling class already.
    """
    return ask_slice(SLICE_US, niceness(), 0 if children else RESET_ON_FORK)


def be_steady(thread: int) -> bool:
    """``thread`` of this process, once it runs, goes on for long, unless somebody wakes who asks for less; what it starts does not.

    False, and nothing is changed, in the cases of :func:`be_prompt`.
    """
    return ask_slice(STEADY_SLICE_US, niceness(thread), RESET_ON_FORK, thread)


def be_ordinary(thread: int) -> bool:
    """``thread`` of this process takes turns as any other again, from now on: also when it waits for its turn. As :func:`be_steady`."""
    return ask_slice(KERNEL_SLICE_US, niceness(thread), RESET_ON_FORK, thread)


def give_way() -> bool:
    """The calling thread, and those that it starts from now on, take what others leave and give it back at once. Linux: only it.

    False where the kernel knows no slices; it is nicer there all the same.
    """
    return ask_slice(NICE_SLICE_US, be_nicer(NICE), 0)


def bow_out(pid: int) -> None:
    """The process is being killed: what it does now, which is to free its memory, is done on what others leave.

    That takes a core 50 ms for 470 MB, just when those who are left compute what the dead one had to. Niceness, and no idle class: on a
    machine that is never idle it has to end, too.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile; the last one frees the memory
            set_niceness(int(thread), LAST)
