"""A program that leaves no room on a filesystem: it holds a file without a name, of all that is free.

``python chaos/ballast.py FOLDER MOST_BYTES SECONDS`` writes ``ready``, or why it cannot be: more than ``MOST_BYTES`` are free, say. When
the time is over, when standard input ends or SIGTERM comes, it ends, and however it ends, the kernel frees what the file took. It imports
nothing but the standard library, as it has to be there at once.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys

PIECES = (1 << 26, 1 << 20, 1 << 12)
"""Bytes that are asked for at once, as long as there are so many."""


def free_bytes(folder: str) -> int:
    """What this process may still write there. Raises OSError."""
    found = os.statvfs(folder)
    return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize


def fill(folder: str) -> int:
    """Take all that is free, with a file of this process that nobody sees; returns its descriptor. Raises OSError."""
    held, size = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600), 0
    for piece in PIECES:
        try:
            while True:
                os.posix_fallocate(held, size, piece)
                size += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                os.close(held)
                raise
    return held


def main(folder: str, most_bytes: str, lasts_s: str) -> None:
    """As the command line says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        free = free_bytes(folder)
        if free > int(most_bytes):
            raise OSError(f"{free:,} bytes are free in {folder}: chaos takes no more than {int(most_bytes):,}")
        fill(folder)
    except OSError as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    print("ready", flush=True)
    select.select([sys.stdin], [], [], float(lasts_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
