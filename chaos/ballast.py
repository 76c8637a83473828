"""A program that leaves no room on a filesystem: it holds a file without a name that takes all free bytes.

``python chaos/ballast.py FOLDER MOST_BYTES SECONDS`` writes ``ready``, or the reason why it cannot fill the filesystem. One reason is that
more than ``MOST_BYTES`` are free. It ends when the time is over, when standard input ends or SIGTERM comes. In every case the kernel frees
the bytes of the file. It imports nothing but the standard library, as it has to start at once.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys

PIECES = (1 << 26, 1 << 20, 1 << 12)
"""Sizes of pieces that it asks for, as long as so many bytes are free."""


def free_bytes(folder: str) -> int:
    """Bytes that this process may still write there. Raises OSError."""
    found = os.statvfs(folder)
    return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize


def fill(folder: str) -> int:
    """Take all free bytes, with a file of this process that has no name. Returns its descriptor. Raises OSError."""
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
    """Run as the command line says."""
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
