"""Reading and writing past the page cache, so that blocks come and go at the disk's rate, and a checkpoint drives nothing out of memory.

Several threads that read one file through the cache disturb its read-ahead, and get some 0.7 of what the disk gives; one thread, that also
makes room and takes digests, gets less. What is written through it needs memory as large as the file, which takes longer to get than the
disk to write where the machine has to fetch it from its host: from 0.3 to 3 GB/s in turn were seen, against 2.5 to 3 past it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np

from storage.backends.blocks import BLOCK_BYTES, Segments, SharedReader

PAGE_BYTES = 4096
"""What offsets, lengths and addresses of such reads are multiples of: no disk asks for more."""

_O_DIRECT = getattr(os, "O_DIRECT", None)
_thread = threading.local()


@contextmanager
def past_the_cache(path: Path, through: SharedReader) -> Iterator[SharedReader]:
    """A reader of ``path`` that goes past the cache; ``through`` where the file system has no such way, or the file is small."""
    descriptor = _opened(path, os.O_RDONLY) if path.stat().st_size >= BLOCK_BYTES else None
    if descriptor is None:
        yield through
        return
    try:
        yield _DirectReader(descriptor, through)
    finally:
        os.close(descriptor)


class DirectWriter:
    """Writes blocks of a file that ``descriptor`` has open for writing, too, by any number of threads. Then :meth:`close` it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._file = path, descriptor
        self._direct: int | None = None
        self._lock = threading.Lock()
        self._refused = False
        self._end = 0

    def write(self, offset: int, data: Segments) -> bool:
        """False when nothing was written, as there is no such way here. ``offset`` is a multiple of PAGE_BYTES."""
        size = sum(map(len, data))
        with self._lock:
            self._end = max(self._end, offset + size)  # whichever way it goes: nothing of it is to be cut off
        descriptor = self._descriptor()
        if descriptor is None:
            return False
        padded = -(-size // PAGE_BYTES) * PAGE_BYTES
        pages, at = _room(padded), 0
        for segment in data:
            np.copyto(pages[at : at + len(segment)], np.frombuffer(segment, dtype=np.uint8))  # does not keep the interpreter's lock
            at += len(segment)
        with _Refusals():  # some file systems say so only now
            _write_all(descriptor, pages, offset)
            return True
        self._refused = True
        return False

    def _descriptor(self) -> int | None:
        with self._lock:
            if self._direct is None and not self._refused:
                self._direct = _opened(self._path, os.O_WRONLY)
                self._refused = self._direct is None
            return None if self._refused else self._direct

    def close(self) -> None:
        """Nothing is left to be written. What the last block was longer by is cut off."""
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None
        if self._end and os.fstat(self._file).st_size > self._end:
            os.ftruncate(self._file, self._end)


def _write_all(descriptor: int, pages: np.ndarray, offset: int) -> None:
    written = 0
    while written < len(pages):
        written += os.pwritev(descriptor, [pages[written:].data], offset + written)


class _Refusals(AbstractContextManager[None, bool]):
    """A file system that knows no such way says EINVAL: what follows the block is what is done then."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        return isinstance(error, OSError) and error.errno == errno.EINVAL


def _opened(path: Path, flags: int) -> int | None:
    if _O_DIRECT is not None:
        with _Refusals():
            return os.open(path, flags | _O_DIRECT)
    return None


class _DirectReader:
    def __init__(self, descriptor: int, through: SharedReader) -> None:
        self._descriptor, self._through, self._refused = descriptor, through, False

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        if self._refused or not self._past(offset, views):
            self._refused = True
            self._through.into(offset, views)

    def _past(self, offset: int, views: Sequence[memoryview]) -> bool:
        at = offset % PAGE_BYTES
        with _Refusals():  # some file systems say so only now
            pages = self._pages(offset - at, at + sum(map(len, views)))
            for view in views:
                np.copyto(np.frombuffer(view, dtype=np.uint8), pages[at : at + len(view)])  # does not keep the interpreter's lock
                at += len(view)
            return True
        return False

    def _pages(self, offset: int, count: int) -> np.ndarray:
        """At least ``count`` bytes from ``offset`` on, in memory that the thread's next call uses again."""
        pages = _room(-(-count // PAGE_BYTES) * PAGE_BYTES)
        filled = 0
        while filled < count:
            got = os.preadv(self._descriptor, [pages[filled:].data], offset + filled)
            filled += got
            if filled < count and (got == 0 or filled % PAGE_BYTES):
                raise EOFError(f"the file ends at byte {offset + filled}")
        return pages


def _room(size: int) -> np.ndarray:
    """``size`` bytes of this thread's own, beginning with a page."""
    if getattr(_thread, "room", None) is None or len(_thread.room) < size:
        memory = np.empty(size + PAGE_BYTES, dtype=np.uint8)
        start = -memory.ctypes.data % PAGE_BYTES
        _thread.room = memory[start : start + size]
    found: np.ndarray = _thread.room[:size]
    return found
