"""A rank's output goes to a file of its own: the standard streams lead there.

This happens at the level of file descriptors, so it includes output of C libraries and children. Each line is written to the kernel at
once. So a killed process loses no line that it has printed.

Output is worth less than the run's records and checkpoints, which may lie on the same disk. So before the disk is full, and when the file
cannot be written, Fleet drops and counts Python's output. The train function sees no error.
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
"""Size of a file of output. One process keeps at most two: the present file, and the one before."""
LEFT_BYTES, LEFT_MOST_BYTES, LEFT_SHARE = 16 * 2**20, 2**30, 50
"""Output leaves a part of a disk free: one in ``LEFT_SHARE``, within the two bounds."""
LOOK_BYTES = 64 * 2**10
"""After so much output the free space of the disk is checked."""


class RankLog:
    """Lets this process print into ``path``. Any thread may call its methods before :meth:`close`.

    If the file cannot be opened, the log says so, output goes where it went before, and the run goes on. :meth:`limit` and :meth:`close`
    call ``on_dropped`` with the number of dropped bytes and the reason: once after the first drop, and once with the total.

    It also resets ``logging`` to its first state: Ray puts handlers on the root logger, and ``logging.basicConfig`` would have no effect.
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
            log.warning("the output of this rank is not kept: %s", error)
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
        """Write a line of Fleet at the begin and the end of a rehearsal: the output between them is the rehearsal's."""
        if self._saved:
            flush()
            self.write(self._file, f"{REHEARSAL if begins else REHEARSED}\n".encode())

    def write(self, descriptor: int, data: bytes) -> int:
        """Write or drop ``data``. Returns how many bytes were written or dropped. From any thread."""
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
        """Write one line into the file about dropped output, if there is any. Raises OSError."""
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
        """Begin a new file when this one is too long. The file before is kept, older ones are dropped, and the new one says so. It is
        cheap."""
        if not self._reported_bytes:
            self._report()
        with self._lock:
            if self._saved and os.fstat(self._file).st_size >= self._most_bytes:
                try:
                    self._begin_anew()
                except OSError as error:
                    log.warning("the file of this rank's output grows on: %s", error)
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
        """Let the streams and ``logging`` lead to where they led before."""
        self._report()
        with self._lock:
            if self._saved:
                self._restore()

    def _restore(self) -> None:
        flush()
        try:
            self._mark(self._file)
        except OSError as error:
            log.warning("%d bytes of this rank's output are not in its file: %s", self._unsaid_bytes, error)
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
    """Write the data that Python still holds for the standard streams."""
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
    """A text stream with one write for each line, so that lines of a rank's threads and children do not mix."""
    raw = io.BufferedWriter(_Output(descriptor, kept))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
