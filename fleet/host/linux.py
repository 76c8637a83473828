"""Calls of Linux about processes, threads, cores, memory and room on disks, one function each; no other module makes these calls.

:mod:`fleet.host.scheduling` and :mod:`fleet.host.cores` use them, and give the reasons.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from collections.abc import Set

RESET_ON_FORK = 1
"""Flag of sched_setattr(2): threads and processes that the thread starts later do not inherit the attributes."""

FIRST_FILE = 3
"""The first open file after the standard streams."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_CLOSE_RANGE = 436
"""The system call, on every architecture. Unlike unshare(2), containers may use it without privileges."""

_UNSHARE = 2
_LAST_FILE = (1 << 32) - 1
_PR_SET_PDEATHSIG = 1
_M_ARENA_MAX = -8
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20
_FALLOC_FL_KEEP_SIZE = 1
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class _SchedAttr(ctypes.Structure):
    """``struct sched_attr``, version 0: sched_setattr(2)."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def ask_slice(slice_us: int, niceness: int, flags: int, thread: int = 0) -> bool:
    """``thread`` (0: the calling one) asks for slices of so many microseconds; 0 is the kernel's own length (Linux 6.12).

    Returns False, without a change, where the kernel does not know the request, or the thread is of another scheduling class already.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return False
    wanted = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        policy=os.SCHED_OTHER,
        flags=flags,
        nice=niceness,
        runtime=slice_us * 1000,
    )
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, thread, ctypes.byref(wanted), 0) == 0)


def niceness(thread: int = 0) -> int:
    """How nice ``thread`` is; 0: the calling one. Raises ProcessLookupError when it has ended."""
    return os.getpriority(os.PRIO_PROCESS, thread)


def be_nicer(by: int) -> int:
    """Raise the niceness of the calling thread, and of the threads that it starts from now on. Returns the new niceness."""
    return os.nice(by)


def set_niceness(thread: int, nice: int) -> None:
    """Raises ProcessLookupError when ``thread`` has ended, PermissionError when it is another user's."""
    os.setpriority(os.PRIO_PROCESS, thread, nice)


def allowed_cores(thread: int = 0) -> set[int]:
    """The numbers of the cores that ``thread`` may run on; 0: the calling one. Raises ProcessLookupError when it has ended."""
    return os.sched_getaffinity(thread)


def allow_cores(thread: int, cores: Set[int]) -> None:
    """``thread`` may run on ``cores`` from now on, and moves to one of them. Raises OSError when it has ended, or no such core exists."""
    os.sched_setaffinity(thread, cores)


def die_with_parent() -> bool:
    """SIGKILL for this process when the thread that started it ends. False where the system cannot do that, or the parent is gone."""
    return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0 and os.getppid() != 1


def leave_shared_files(kept: int) -> bool:
    """From here on this thread has its own table of open files, with the standard streams and ``kept``. False where that is impossible."""
    call = ctypes.CDLL(None).syscall
    if call(_CLOSE_RANGE, ctypes.c_uint(kept + 1), ctypes.c_uint(_LAST_FILE), ctypes.c_uint(_UNSHARE)) != 0:
        return False
    if kept > FIRST_FILE:
        call(_CLOSE_RANGE, ctypes.c_uint(FIRST_FILE), ctypes.c_uint(kept - 1), ctypes.c_uint(0))
    return True


def use_one_arena() -> None:
    """From now on the threads of this process allocate from one arena. Without glibc this does nothing.

    A rank has few threads, and hardly two of them allocate at once. But each arena keeps all memory that it once had. With a model of
    10 million parameters a rank had 390 to 420 MB more than at its start, and 380 to 390 MB with one arena.
    """
    _mallopt(_M_ARENA_MAX, 1)


def give_large_blocks_back() -> None:
    """From now on a block of 1 MiB or more goes back to the kernel when it is freed. Without glibc this does nothing.

    glibc raises this size, up to 32 MiB, when a larger block is freed. A rank that gathers units then keeps much freed memory between
    blocks in use. Four ranks that share 10 million parameters hold 206 to 240 MB more than at the start, and 164 to 169 MB with 1 MiB.
    Their step is as fast. A step of whole replicas, which frees large blocks all the time, takes a fifth longer: they leave it.
    """
    _mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _mallopt(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def hold_room(descriptor: int, start: int, size_bytes: int) -> bool:
    """Hold so much of the disk for the open file's bytes from ``start`` on; the file's size stays the same. Held room stays held.

    False where the filesystem cannot do that. Raises OSError when the disk has less room.
    """
    call = ctypes.CDLL(None, use_errno=True).fallocate64
    if call(descriptor, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(size_bytes)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number))
