"""A program that slows a disk down: it limits the bytes a second that are written to the device of a filesystem.

``python chaos/brake.py FOLDER BYTES_PER_S SECONDS`` has the kernel limit writes to the device that the filesystem of ``FOLDER`` is on. It
writes ``ready``, or the reason why it cannot do that. It removes the limit when the time is over, when standard input ends or SIGTERM
comes. A child removes it when this program is killed. When both are killed at once, a note on that filesystem keeps the limit on record,
and :func:`sweep` removes it. The program imports nothing but the standard library, as it has to start at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

LIMITS = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
"""Limit of all writes of the host, in cgroup version 1. Version 2 has no limit for all, and none for the kernel's later writes."""
NOTE = ".fleet-slowed"
"""A file at the root of a slowed filesystem; it names the program that slowed it."""


def device_of(folder: Path) -> str:
    """``major:minor`` of the device that a folder's filesystem is on. Raises OSError."""
    found = os.stat(folder).st_dev
    if not os.major(found):
        raise OSError(f"{folder} has no device of its own")
    return f"{os.major(found)}:{os.minor(found)}"


def limit_of(device: str, limits: Path) -> int:
    """Bytes a second; 0: none. Raises OSError."""
    return next((int(line.split()[1]) for line in limits.read_text().splitlines() if line.split()[0] == device), 0)


class Brake:
    """The limit of the filesystem whose root is ``root``. Raises OSError, also when another program has set one."""

    def __init__(self, root: Path, bytes_per_s: int, limits: Path = LIMITS) -> None:
        if not limits.exists():
            raise OSError(f"{limits} is missing: a slow disk needs cgroup version 1, and root")
        self._limits, self._device, self._note, self._pid = limits, device_of(root), root / NOTE, str(os.getpid())
        if limit_of(self._device, limits):
            raise OSError(f"device {self._device} has a limit already")
        self._note.write_text(self._pid)
        self._limits.write_text(f"{self._device} {bytes_per_s}")

    def off(self) -> None:
        """Remove the limit, at most once: another program may have set one since."""
        if self._note.exists() and self._note.read_text() == self._pid:
            self._limits.write_text(f"{self._device} 0")
            self._note.unlink()


def sweep(root: Path, limits: Path = LIMITS) -> None:
    """Remove a limit whose program is gone."""
    note = root / NOTE
    if note.exists() and not Path(f"/proc/{note.read_text() or 0}").exists():
        limits.write_text(f"{device_of(root)} 0")
        note.unlink()


def _guard(brake: Brake) -> None:
    """Fork a child that waits for the end of this process, and removes the limit."""
    mine, its = os.pipe()
    if os.fork():
        os.close(mine)
        return
    os.close(its)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    os.read(mine, 1)
    brake.off()
    os._exit(0)


def main(folder: str, bytes_per_s: str, lasts_s: str) -> None:
    """Run as the command line says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        brake = Brake(Path(folder), int(float(bytes_per_s)))
    except OSError as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    try:
        _guard(brake)
        print("ready", flush=True)
        select.select([sys.stdin], [], [], float(lasts_s))
    finally:
        with suppress(OSError):  # the child does it then
            brake.off()


if __name__ == "__main__":
    main(*sys.argv[1:])
