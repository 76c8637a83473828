"""A program that leaves a process no more memory: the kernel kills the process as soon as it asks for some.

``python chaos/confine.py PIDFD PID SECONDS`` makes a memory group (cgroup) without any memory, and moves the process into it. Memory that
the process already has stays charged to its old group. The program writes ``ready``, or the reason why it cannot do that. It ends when the
process has ended, when the time is over, when standard input ends or SIGTERM comes. Then it moves live processes back, and removes the
group. The group has the PID of this program in its name, so that :func:`sweep` can find a group that was left behind. It imports nothing
but the standard library, as it has to start at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "fleet-"
LIMIT_BYTES = 0
GONE_S, LOOK_S = 2.0, 0.02
"""How long the kernel may take to remove the last process from the group, and the time between two looks."""
LIMITS = ("memory.limit_in_bytes", "memory.max")
"""The file of the limit, in cgroup version 1 and 2."""


def memory_group(groups: str, root: Path = ROOT) -> Path:
    """The memory group of a process, from its ``/proc/PID/cgroup``; of either version. Raises OSError."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "memory" if controllers else root
            for folder in (base / path.strip("/"), base):  # a container may not see its own group by the name that the host knows
                if any((folder / name).exists() for name in LIMITS) or (controllers and (folder / "cgroup.procs").exists()):
                    return folder
    raise OSError("it is in no memory group")


class BoundGroup:
    """A bounded group below ``parent``, with the PID of its maker in its name. Raises OSError where the kernel cannot make it.

    Args:
        prefix: of its name.
        of: the bounded resource, in words.
        limits: file of the group -> its contents; of several such tables, the first whose files the kernel has.
    """

    def __init__(self, parent: Path, prefix: str, of: str, limits: Sequence[Mapping[str, str]]) -> None:
        self.parent, self.folder = parent, parent / f"{prefix}{os.getpid()}-{os.urandom(3).hex()}"
        self.folder.mkdir()
        try:
            known = next((each for each in limits if all((self.folder / name).exists() for name in each)), None)
            if known is None:
                raise OSError(f"groups below {parent} have no limit of {of}: the controller is not enabled for them")
            for name, value in known.items():
                (self.folder / name).write_text(value)
        except OSError:
            self.folder.rmdir()
            raise

    def take(self, pid: int) -> None:
        """Move a process into the group, with its threads and its later children. Raises OSError when it has ended."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Move live processes back, and remove the group."""
        end_s = time.monotonic() + GONE_S
        while self.folder.exists() and time.monotonic() < end_s:
            for pid in self._inside():
                with suppress(OSError):  # it has ended meanwhile
                    (self.parent / "cgroup.procs").write_text(str(pid))
            with suppress(OSError):  # the kernel has not removed the last one yet
                self.folder.rmdir()
                return
            time.sleep(LOOK_S)

    def _inside(self) -> Iterator[int]:
        with suppress(OSError):
            yield from map(int, (self.folder / "cgroup.procs").read_text().split())


def confined(parent: Path) -> BoundGroup:
    """A group without any memory, in either version."""
    return BoundGroup(parent, PREFIX, "memory", [{name: str(LIMIT_BYTES)} for name in LIMITS])


def sweep(parent: Path, prefix: str = PREFIX) -> None:
    """Remove groups below ``parent`` whose maker is gone."""
    for folder in parent.glob(f"{prefix}[0-9]*-*"):
        if not Path(f"/proc/{folder.name.removeprefix(prefix).partition('-')[0]}").exists():
            with suppress(OSError):  # a process is in it
                folder.rmdir()


def main(pidfd: str, pid: str, lasts_s: str) -> None:
    """Run as the command line says. SIGTERM only wakes it: it may come during the removal of the group, and must not stop that."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        group = confined(memory_group(Path(f"/proc/{pid}/cgroup").read_text()))
    except OSError as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    try:
        group.take(int(pid))
        print("ready", flush=True)
        select.select([int(pidfd), sys.stdin, reader], [], [], float(lasts_s))
    finally:
        group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
