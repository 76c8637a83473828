"""What the kernel says of a process in ``/proc``."""

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
    """Field 22: when the process started, in clock ticks since boot. With the pid, it names one process for good.

    Raises:
        ProcessLookupError: there is no such process.
    """
    return int(stat_fields(pid)[19])


def handles(pid: int, number: int) -> bool:
    """Whether signal ``number``, sent to the process, still waits for its main thread or that thread is in its handler, which blocks it.

    False for a process that has ended. The kernel hands a process's signals to its main thread unless that blocks them.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:", "SigBlk:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def peak_bytes() -> int:
    """The most memory that this process has had at a time; 0 where the kernel does not say. What it was forked off does not count."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def core_wait_us(pid: int) -> int:
    """How long the main thread of a process could run and had to wait for a core, since it began; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) // 1000
    except (FileNotFoundError, ProcessLookupError):
        return 0
