"""A program that leaves a process no more memory: the kernel kills it as soon as it asks for some.

``python chaos/confine.py PIDFD PID SECONDS`` makes a memory group (cgroup) of its own without any memory and moves the process into it;
what the process has already stays charged where it was. It writes ``ready``, or why it cannot be. When the process has ended, when the time
is over, when standard input ends or SIGTERM comes, what still lives is moved back, and the group is removed. The group has the PID of this
program in its name, so that :func:`sweep` can tell one that was left behind. It imports nothing but the standard library, as it has to be
there at once.
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
"""For the kernel to take the last process out of the group, and how often it is looked for."""
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
    """A group below ``parent`` that is bounded, and has the PID of its maker in its name. Raises OSError where it cannot be.

    Args:
        prefix: of its name.
        of: what is bounded, in words.
        limits: file of the group -> what it is to say; of several such tables the first whose files the kernel has.
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
        """Move a process into the group, with its threads and what it starts from now on. Raises OSError when it has ended."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Move back who lives, and remove the group."""
        end_s = time.monotonic() + GONE_S
        while self.folder.exists() and time.monotonic() < end_s:
            for pid in self._inside():
                with suppress(OSError):  # it has ended meanwhile
                    (self.parent / "cgroup.procs").write_text(str(pid))
            with suppress(OSError):  # the kernel has not taken the last one out yet
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
            with suppress(OSError):  # somebody is in it
                folder.rmdir()


def main(pidfd: str, pid: str, lasts_s: str) -> None:
    """As the command line says. SIGTERM only wakes it: it may come while the group is being removed already, and must not end that."""
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
