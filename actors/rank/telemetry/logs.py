"""What a rank prints goes to a file of its own: the standard streams lead there, whoever writes to them.

At the level of file descriptors, so that it holds for C libraries and for children too. The file is written by the kernel, line by line:
of a process that is killed nothing is lost that it has printed.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

from fleet.app.rank_logs import REHEARSAL, REHEARSED, older

log = logging.getLogger("fleet.rank.logs")
STREAMS = (1, 2)
MOST_BYTES = 64 * 2**20
"""Of one process no more than twice as much is kept: the file itself, and the one before."""


class RankLog:
    """From here on this process prints into ``path``. Before :meth:`close` it may be called from any thread.

    A file that cannot be written is told in the log, and printing stays as it was: no run ends for that.

    Also gives ``logging`` its first state back: Ray puts handlers on the root logger, and ``logging.basicConfig`` would do nothing.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._before = sys.stdout, sys.stderr
        self._saved: list[int] = []
        self._lock = threading.Lock()
        root = logging.getLogger()
        self._root = root.handlers[:], root.level
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._opened()
        except OSError as error:
            log.warning("what this rank prints is not kept: %s", error)
            return
        flush()
        self._saved = [os.dup(stream) for stream in STREAMS]
        self._point()
        sys.stdout, sys.stderr = (_by_line(stream) for stream in STREAMS)
        root.handlers[:] = []
        root.setLevel(logging.WARNING)

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _point(self) -> None:
        for stream in STREAMS:
            os.dup2(self._file, stream)

    def rehearse(self, begins: bool) -> None:
        """Between two lines of Fleet's own, what is printed is that of a rehearsal."""
        if self._saved:
            flush()
            os.write(self._file, f"{REHEARSAL if begins else REHEARSED}\n".encode())

    def limit(self) -> None:
        """Begin a new file when this one has grown too long; the one before the last is dropped, and the new one says so. Cheap."""
        with self._lock:
            if self._saved and os.fstat(self._file).st_size >= self._most_bytes:
                try:
                    self._begin_anew()
                except OSError as error:
                    log.warning("the file of what this rank prints grows on: %s", error)
                    self._most_bytes *= 2

    def _begin_anew(self) -> None:
        dropped = older(self._path).exists()
        self._path.rename(older(self._path))
        anew = self._opened()
        full, self._file = self._file, anew
        before = "and those before them were dropped" if dropped else "and are the first"
        os.write(self._file, f"[fleet] the lines before this one are in {older(self._path).name}, {before}\n".encode())
        self._point()
        os.close(full)

    def close(self) -> None:
        """The streams and ``logging`` lead to where they led before."""
        with self._lock:
            if self._saved:
                self._restore()

    def _restore(self) -> None:
        flush()
        for stream, saved in zip(STREAMS, self._saved, strict=True):
            os.dup2(saved, stream)
            os.close(saved)
        self._saved = []
        os.close(self._file)
        sys.stdout, sys.stderr = self._before
        root = logging.getLogger()
        root.handlers[:], level = self._root
        root.setLevel(level)


def flush() -> None:
    """Write what Python still holds of the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _by_line(descriptor: int) -> TextIO:
    """One write for each line: those of a rank's threads and children do not mix within a line."""
    raw = io.FileIO(descriptor, "ab", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)
