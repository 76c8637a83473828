"""The run's journal: one JSON line a record, only ever appended to. ``docs/journal.md`` names its place and its writer.

A line is complete when it ends in a newline. A process that dies during a write leaves at most one incomplete last line. Readers leave that
line out and say so, and a writer that opens the file again cuts it off. Readers refuse damage anywhere else, by file and line.
"""

from __future__ import annotations

import fcntl
import io
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from fleet.errors import JournalError, ProtocolError
from fleet.host.clock import Clock, MonotonicClock
from fleet.host.linux import hold_room
from fleet.protocol.journal import decode_line, encode_line
from fleet.protocol.records import VERSION, Record, RunStarted

logger = logging.getLogger("fleet.host.journal")

FLUSH_INTERVAL_S = 0.05
FLUSH_BYTES = 256 * 1024
ROOM_BYTES = 1 << 20
"""The writer holds at least so much of the disk behind the last line: a run whose disk is full can still write its end. With the room that
it holds above that, the run goes on for a while on a full disk."""
_SPANS_PREFIX = b'["Spans",'
_BLOCK_BYTES = 64 * 1024


def _decode_at(path: Path, number: int, line: bytes) -> Record:
    try:
        record = decode_line(line)
    except (ProtocolError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise JournalError(
            f"{path}:{number}: not a record of a journal of version {VERSION}: {error} (line begins {line[:60]!r})"
        ) from error
    if number == 1 and not isinstance(record, RunStarted):
        raise JournalError(f"{path}:1: a journal starts with RunStarted, this one with {type(record).__name__}")
    return record


def _log_torn(message: str) -> None:
    logger.warning(message)


def read_journal(path: str | os.PathLike[str], *, spans: bool = True, on_torn: Callable[[str], None] = _log_torn) -> Iterator[Record]:
    """The records of the journal at ``path``, in order.

    Args:
        path: the journal file.
        spans: False: skip ``Spans`` unread. The protocol needs only the other records, and they bound a replay.
        on_torn: called with a sentence when the last line is incomplete; that line is left out.

    Raises:
        JournalError: a complete line is damaged, or the journal is of another version. Names file and line.
    """
    path = Path(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                on_torn(
                    f"{path}:{number}: the last line is incomplete ({len(line)} bytes) and was left out; its writer died while writing it"
                )
                return
            if spans or not line.startswith(_SPANS_PREFIX):
                yield _decode_at(path, number, line)


class JournalTail:
    """Reads a journal while a process still writes it. Each poll gives the records that were completed since the last one.

    Args:
        path: the journal.
        offset, line: bytes and lines of it that the caller knows already.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0, line: int = 0) -> None:
        self._path = Path(path)
        self._offset, self._line = offset, line

    def poll(self, limit_bytes: int = 1 << 62) -> list[Record]:
        """New records, oldest first; empty while the file does not exist. Reads at most about ``limit_bytes``: call again for the rest.

        Raises JournalError as :func:`read_journal` does. The call before that gives the records before the damage.
        """
        if not self._path.exists():
            return []
        data = self._read(limit_bytes)
        records: list[Record] = []
        for line in data.splitlines(keepends=True):
            try:
                records.append(_decode_at(self._path, self._line + 1, line))
            except JournalError:
                if not records:
                    raise
                return records
            self._line += 1
            self._offset += len(line)
        return records

    @property
    def place(self) -> tuple[int, int]:
        """Bytes and lines read so far."""
        return self._offset, self._line

    @property
    def behind_bytes(self) -> int:
        """Bytes of the file that are not read yet, an incomplete last line included."""
        try:
            return self._path.stat().st_size - self._offset
        except FileNotFoundError:
            return 0

    def _read(self, limit_bytes: int) -> bytes:
        """Whole lines from the offset on, one at least when there is one."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(limit_bytes) if limit_bytes < 1 << 62 else file.read()
            if b"\n" not in data:
                data += file.readline()
        return data[: data.rfind(b"\n") + 1]


def take_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed. False where another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class JournalWriter:
    """Appends to the journal at ``path``; implements :class:`fleet.protocol.ports.JournalPort`. One writer at a time, by a lock.

    The writer gathers records and writes them together: when ``flush`` is called, or ``flush_bytes`` have gathered, or ``flush_interval_s``
    has passed since the last write. It looks at the time when a record is appended. Flushed records survive the death of the process;
    :meth:`sync` and :meth:`close` make them survive that of the machine. :attr:`trouble` reports a full disk before a record is lost.

    Raises:
        JournalError: another process writes this journal, or the file is a journal of another version.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        flush_bytes: int = FLUSH_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self.path = Path(path)
        self._flush_interval_s, self._flush_bytes = flush_interval_s, flush_bytes
        self._clock = clock or MonotonicClock()
        self._pending = bytearray()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(self.path, "a+")
        try:
            self.torn_bytes = self._take_over()
        except BaseException:
            self._file.close()
            raise
        self._flushed_at_s = self._clock.now_s()
        self._bytes, self._held_bytes = os.fstat(self._file.fileno()).st_size, 0.0
        self._full: OSError | None = None
        self._hold_room()

    def _hold_room(self) -> None:
        """Reserve room on the disk. Where the filesystem cannot do that, a full disk shows only when a record is lost."""
        left_bytes = self._held_bytes - self._bytes
        if left_bytes >= 2 * ROOM_BYTES:
            return
        try:
            held = hold_room(self._file.fileno(), self._bytes, 3 * ROOM_BYTES)
        except OSError as error:
            self._full = error if left_bytes < ROOM_BYTES else None
        else:
            self._full, self._held_bytes = None, self._bytes + 3 * ROOM_BYTES if held else math.inf

    @property
    def trouble(self) -> str:
        """The trouble with the file, in a clause that names it; empty without trouble. A full disk still takes the run's last records."""
        if self._full is not None:
            return f"{self.path} cannot grow: [Errno {self._full.errno}] {self._full.strerror}"
        here = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
        except OSError as error:
            return f"{self.path} is gone: [Errno {error.errno}] {error.strerror}"
        same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        return "" if same else f"{self.path} is not the file that the writer has open: it was replaced"

    def _take_over(self) -> int:
        """Lock the file, check that it is a journal to continue, and cut off an incomplete last line. Returns the bytes cut off."""
        if not take_lock(self._file):
            raise JournalError(f"{self.path}: another process is writing this journal")
        next(read_journal(self.path, on_torn=lambda message: None), None)
        size = self._file.seek(0, os.SEEK_END)
        if size == 0:
            sync_directory(self.path.parent)
        keep = _end_of_last_line(self._file, size)
        if keep < size:
            logger.warning("%s: cut off %d bytes of an incomplete last line", self.path, size - keep)
            self._file.truncate(keep)
        return size - keep

    def append(self, record: Record) -> None:
        """Add ``record`` at the end. Raises ProtocolError when it is not a record, ValueError when the journal is closed."""
        if self._file.closed:
            raise ValueError(f"{self.path} is closed")
        self._pending += encode_line(record)
        if len(self._pending) >= self._flush_bytes or self._clock.now_s() - self._flushed_at_s >= self._flush_interval_s:
            self.flush()

    def flush(self) -> None:
        """Hand all appended records to the operating system.

        Raises OSError when the write fails. No record is lost then: the next flush goes on where this one stopped.
        """
        while self._pending:
            written = self._file.write(self._pending)
            self._bytes += written
            del self._pending[:written]
        self._flushed_at_s = self._clock.now_s()
        self._hold_room()

    def sync(self) -> None:
        """Flush, and wait until the records are on the disk."""
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync, and close the file. A second call does no harm."""
        if self._file.closed:
            return
        try:
            self.sync()
            self._file.truncate(self._bytes)  # free the room held behind the last line
        finally:
            self._file.close()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: a file's own fsync does not guarantee its name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _end_of_last_line(file: io.FileIO, size: int) -> int:
    """Offset just after the last newline in the first ``size`` bytes, 0 when there is none."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
