"""The kernel's figures of a process in ``/proc``."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """``/proc/PID/stat`` from field 3 on: state, parent, ...

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The second field is the command's name, in brackets, and may itself hold spaces and brackets.
    return stat[stat.rindex(")") + 2 :].split()


def start_ticks(pid: int) -> int:
    """Field 22: the start of the process, in clock ticks since boot. PID and start together name one process for good.

    Raises:
        ProcessLookupError: there is no such process.
    """
    return int(stat_fields(pid)[19])


def handles(pid: int, number: int) -> bool:
    """Whether signal ``number`` waits for the process's main thread, or that thread runs its handler, which blocks the signal.

    False for a process that has ended. The kernel hands a process's signals to its main thread unless that thread blocks them.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:", "SigBlk:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def peak_bytes() -> int:
    """The peak memory of this process; 0 where the kernel does not give it. The memory of the process that forked it does not count."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def core_wait_us(pid: int) -> int:
    """Time in which the main thread of a process could run but waited for a core, since its start; 0 where the kernel does not give it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) // 1000
    except (FileNotFoundError, ProcessLookupError):
        return 0
