"""Reading past the page cache.

Several threads that read one file through it disturb its read-ahead, and get some 0.7 of what the disk gives; one thread, that also makes
room and takes digests, gets less. Read past it, blocks come at the disk's rate, and a checkpoint drives nothing else out of memory.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from storage.blocks import BLOCK_BYTES, Reader

PAGE_BYTES = 4096
"""What offsets, lengths and addresses of such reads are multiples of: no disk asks for more."""

_O_DIRECT = getattr(os, "O_DIRECT", None)
_thread = threading.local()


@contextmanager
def past_the_cache(path: Path, through: Reader) -> Iterator[Reader]:
    """A reader of ``path`` that goes past the cache; ``through`` where the file system has no such way, or the file is small."""
    descriptor = _opened(path)
    if descriptor is None:
        yield through
        return
    try:
        yield _DirectReader(descriptor, through)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int | None:
    if _O_DIRECT is None or path.stat().st_size < BLOCK_BYTES:
        return None
    try:
        return os.open(path, os.O_RDONLY | _O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


class _DirectReader:
    def __init__(self, descriptor: int, through: Reader) -> None:
        self._descriptor, self._through, self._refused = descriptor, through, False

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        size, lead = sum(map(len, views)), offset % PAGE_BYTES
        try:
            pages = None if self._refused else self._pages(offset - lead, lead + size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            pages, self._refused = None, True  # some file systems say so only now
        if pages is None:
            self._through.into(offset, views)
            return
        at = lead
        for view in views:
            np.copyto(np.frombuffer(view, dtype=np.uint8), pages[at : at + len(view)])  # does not keep the interpreter's lock
            at += len(view)

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
