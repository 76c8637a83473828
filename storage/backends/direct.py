"""Reading and writing past the page cache: blocks move at the disk's rate, and a checkpoint drives no other pages out of memory.

Several threads that read one file through the cache disturb its read-ahead, and get some 0.7 of the disk's rate. One thread, which also
makes room and takes digests, gets less. A write through the cache needs memory as large as the file. Where the machine has to get that
memory from its host, this takes longer than the disk's write. Measured rates varied from 0.3 to 3 GB/s, against 2.5 to 3 past the cache.
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
"""Offsets, lengths and addresses of such reads are multiples of this: no disk needs a larger one."""

_O_DIRECT = getattr(os, "O_DIRECT", None)
_thread = threading.local()


@contextmanager
def past_the_cache(path: Path, through: SharedReader) -> Iterator[SharedReader]:
    """A reader of ``path`` that goes past the cache; ``through`` where the file system cannot do that, or the file is small."""
    descriptor = _opened(path, os.O_RDONLY) if path.stat().st_size >= BLOCK_BYTES else None
    if descriptor is None:
        yield through
        return
    try:
        yield _DirectReader(descriptor, through)
    finally:
        os.close(descriptor)


class DirectWriter:
    """Writes blocks of a file by any number of threads, beside its open ``descriptor``. Call :meth:`close` after the last block."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._file = path, descriptor
        self._direct: int | None = None
        self._lock = threading.Lock()
        self._refused = False
        self._end = 0

    def write(self, offset: int, data: Segments) -> bool:
        """False when it wrote nothing, as the file system cannot do that. ``offset`` is a multiple of PAGE_BYTES."""
        size = sum(map(len, data))
        with self._lock:
            self._end = max(self._end, offset + size)  # for both ways of writing: close must not cut it off
        descriptor = self._descriptor()
        if descriptor is None:
            return False
        padded = -(-size // PAGE_BYTES) * PAGE_BYTES
        pages, at = _room(padded), 0
        for segment in data:
            np.copyto(pages[at : at + len(segment)], np.frombuffer(segment, dtype=np.uint8))  # does not keep the interpreter's lock
            at += len(segment)
        with _Refusals():  # some file systems refuse only here
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
        """End the writes, and cut off the padding of the last block."""
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
    """Catches EINVAL of a file system that cannot do this; then the code after the block runs."""

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
        with _Refusals():  # some file systems refuse only here
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
    """``size`` bytes of this thread's own, aligned to a page."""
    if getattr(_thread, "room", None) is None or len(_thread.room) < size:
        memory = np.empty(size + PAGE_BYTES, dtype=np.uint8)
        start = -memory.ctypes.data % PAGE_BYTES
        _thread.room = memory[start : start + size]
    found: np.ndarray = _thread.room[:size]
    return found
