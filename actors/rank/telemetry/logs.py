"""What a rank prints goes to a file of its own: the standard streams lead there, whoever writes to them.

At the level of file descriptors, so that it holds for C libraries and for children too. The file is written by the kernel, line by line:
of a process that is killed nothing is lost that it has printed.

Output is worth less than the run's records and checkpoints, which may lie on the same disk: before that is full, and when a file cannot be
written, what Python prints is dropped and counted, and the train function does not hear of it.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from fleet.host.rank_logs import REHEARSAL, REHEARSED, older

log = logging.getLogger("fleet.rank.logs")
STREAMS = (1, 2)
MOST_BYTES = 64 * 2**20
"""Of one process no more than twice as much is kept: the file itself, and the one before."""
LEFT_BYTES, LEFT_MOST_BYTES, LEFT_SHARE = 16 * 2**20, 2**30, 50
"""Output leaves so much of a disk to others: one part in so many, within these bounds."""
LOOK_BYTES = 64 * 2**10
"""After so much output it is looked at how much of the disk is left."""


class RankLog:
    """From here on this process prints into ``path``. Before :meth:`close` it may be called from any thread.

    A file that cannot be opened is told in the log, and printing stays as it was: no run ends for that. ``on_dropped`` is called with the
    bytes that were dropped and why, from :meth:`limit` and :meth:`close`: once when it begins, and once with all of them.

    Also gives ``logging`` its first state back: Ray puts handlers on the root logger, and ``logging.basicConfig`` would do nothing.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self.on_dropped: Callable[[int, str], object] = lambda dropped_bytes, reason: None
        self._dropped_bytes = self._reported_bytes = self._unsaid_bytes = 0
        self._why, self._since_look = "", LOOK_BYTES
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
        sys.stdout, sys.stderr = (_by_line(stream, self) for stream in STREAMS)
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
            self.write(self._file, f"{REHEARSAL if begins else REHEARSED}\n".encode())

    def write(self, descriptor: int, data: bytes) -> int:
        """Write, or drop it: how many bytes are done with. From any thread."""
        self._since_look += len(data)
        if self._unsaid_bytes or self._since_look >= LOOK_BYTES:
            self._since_look = 0
            if not has_room(descriptor):
                return self._drop(data, "little of the disk is left, and that is for the run's records and checkpoints")
        try:
            self._mark(descriptor)
            return os.write(descriptor, data)
        except OSError as error:
            return self._drop(data, f"[Errno {error.errno}] {error.strerror}: {self._path}")

    def _mark(self, descriptor: int) -> None:
        """Where something was dropped, one line of the file says so. Raises OSError."""
        if self._unsaid_bytes:
            os.write(descriptor, f"[fleet] {self._unsaid_bytes:,} bytes were dropped here: {self._why}\n".encode())
            self._unsaid_bytes = 0

    def _drop(self, data: bytes, why: str) -> int:
        self._dropped_bytes += len(data)
        self._unsaid_bytes += len(data)
        self._why = why
        return len(data)

    def _report(self) -> None:
        if self._dropped_bytes > self._reported_bytes:
            self._reported_bytes = self._dropped_bytes
            self.on_dropped(self._dropped_bytes, self._why)

    def limit(self) -> None:
        """Begin a new file when this one has grown too long; the one before the last is dropped, and the new one says so. Cheap."""
        if not self._reported_bytes:
            self._report()
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
        self._report()
        with self._lock:
            if self._saved:
                self._restore()

    def _restore(self) -> None:
        flush()
        try:
            self._mark(self._file)
        except OSError as error:
            log.warning("%d bytes of what this rank has printed are not in its file: %s", self._unsaid_bytes, error)
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


def has_room(descriptor: int) -> bool:
    """Whether output may take more of the disk on which the open file lies."""
    disk = os.fstatvfs(descriptor)
    size_bytes = disk.f_blocks * disk.f_frsize
    left_bytes = min(max(LEFT_BYTES, size_bytes // LEFT_SHARE), LEFT_MOST_BYTES, size_bytes // 4)
    return disk.f_bavail * disk.f_frsize > left_bytes


class _Output(io.RawIOBase):
    """A standard stream, into the rank's file."""

    def __init__(self, descriptor: int, kept: RankLog) -> None:
        self._descriptor, self._kept = descriptor, kept

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any, /) -> int:
        return self._kept.write(self._descriptor, bytes(data))


def _by_line(descriptor: int, kept: RankLog) -> TextIO:
    """One write for each line: those of a rank's threads and children do not mix within a line."""
    raw = io.BufferedWriter(_Output(descriptor, kept))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
