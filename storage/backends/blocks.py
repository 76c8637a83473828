"""Files as blocks: several threads write and read them, and hash each block beside the transfer.

A file's digest is the SHA-256 of the digests of its blocks of ``BLOCK_BYTES``, in order, which are XXH3 of 128 bits. It finds damage, not
forgery: a process that can write to the store can write a manifest too. SHA-256 over all bytes would be slower than the disk.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import xxhash

BLOCK_BYTES = 16 << 20
PIECE_BYTES = 4096
READ_WORKERS = 4

Segments = Sequence[memoryview | bytearray]
"""Pieces of memory, one after the other."""


class Sink(Protocol):
    """The target of a file's blocks. ``workers``: most blocks under way at once; :meth:`block` is called from their threads."""

    workers: int

    def block(self, number: int, data: Segments) -> None:
        """Store block ``number`` of a file of several; all but the last have BLOCK_BYTES."""
        ...

    def whole(self, data: Segments) -> None:
        """Store a file of one block."""
        ...


class SharedReader(Protocol):
    """A file that several threads may read at once."""

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one after the other, from ``offset`` on. Raises EOFError where the file ends before, or OSError."""
        ...


def block_digest(data: Segments) -> bytes:
    """XXH3, 128 bits, of all bytes of the segments together."""
    digest = xxhash.xxh3_128()
    for segment in data:
        digest.update(segment)
    return digest.digest()


def digest_of(blocks: Iterable[bytes]) -> str:
    """The file's digest in hex, from those of its blocks."""
    return hashlib.sha256(b"".join(blocks)).hexdigest()


class BlockStream(AbstractContextManager["BlockStream", None]):
    """A file object for writing only, in order.

    Memory that does not change until :meth:`finish` is stored from its place: ``bytes``, and ``stable`` stretches of (address, bytes). All
    other bytes are copied, and may change as soon as :meth:`write` returns. At most ``workers + 2`` blocks are held as copies.

    Only :meth:`finish` raises. When its target raises, torch.save raises a RuntimeError of its own in place of the cause.
    """

    def __init__(self, sink: Sink, stable: Iterable[tuple[int, int]] = ()) -> None:
        self._sink, self._pool = sink, ThreadPoolExecutor(sink.workers, thread_name_prefix="fleet-blocks")
        self._stable = sorted(stable)
        self._digests: list[Future[bytes]] = []
        self._busy: set[Future[bytes]] = set()
        self._segments: list[memoryview | bytearray] = []
        self._filled = self._position = 0
        self._failed: BaseException | None = None
        self.pieces: dict[int, int] = {}
        """Offset -> bytes of every write of at least PIECE_BYTES."""

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= PIECE_BYTES:
            self.pieces[self._position] = len(view)
        self._position += len(view)
        if self._failed is None:
            try:
                self._put(view, isinstance(data, bytes) or self._stays(view))
            except BaseException as error:  # noqa: BLE001 - finish raises it
                self._failed = error
        return len(view)

    def _stays(self, view: memoryview) -> bool:
        if len(view) < PIECE_BYTES:
            return False
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data
        index = bisect_right(self._stable, (address, sys.maxsize)) - 1
        return index >= 0 and address + len(view) <= sum(self._stable[index])

    def _put(self, view: memoryview, stays: bool) -> None:
        while view:
            if self._filled == BLOCK_BYTES:
                self._store()
            piece, view = view[: BLOCK_BYTES - self._filled], view[BLOCK_BYTES - self._filled :]
            self._filled += len(piece)
            if stays and len(piece) >= PIECE_BYTES:
                self._segments.append(piece)
            elif self._segments and isinstance(self._segments[-1], bytearray):
                self._segments[-1] += piece
            else:
                self._segments.append(bytearray(piece))

    def _store(self) -> None:
        """Hand the block on; wait while too many are under way."""
        while len(self._busy) > self._sink.workers:
            done, self._busy = wait(self._busy, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
        self._digests.append(self._pool.submit(self._one, len(self._digests), self._segments))
        self._busy.add(self._digests[-1])
        self._segments, self._filled = [], 0

    def _one(self, number: int, data: Segments) -> bytes:
        digest = block_digest(data)
        self._sink.block(number, data)
        return digest

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Without effect on gathered bytes: only :meth:`finish` makes the file whole."""

    def close(self) -> None:
        """Without effect: :meth:`finish` closes the file, and a function that only got this stream must not close it."""

    def finish(self) -> tuple[int, str]:
        """Store the rest. Returns (bytes, digest). Raises OSError when any block was not stored."""
        if self._failed is not None:
            raise self._failed
        if not self._digests:
            self._sink.whole(self._segments)
            return self._position, digest_of([block_digest(self._segments)])
        self._store()
        return self._position, digest_of([block.result() for block in self._digests])


class Extents:
    """Stretches of a file and their places in memory; the bytes between them go to scratch memory."""

    def __init__(self, extents: Iterable[tuple[int, memoryview]] = ()) -> None:
        self._extents = sorted(((offset, view) for offset, view in extents if len(view)), key=lambda extent: extent[0])
        self._offsets = [offset for offset, _ in self._extents]

    def views(self, start: int, stop: int, scratch: memoryview) -> Iterator[memoryview]:
        """Views that hold bytes ``start`` to ``stop`` of the file, in order. ``scratch`` has at least ``stop - start`` bytes."""
        index = max(0, bisect_right(self._offsets, start) - 1)
        at = start
        while at < stop:
            offset, view = self._extents[index] if index < len(self._extents) else (stop, scratch[:0])
            if offset + len(view) <= at and index < len(self._extents):
                index += 1
            elif offset <= at:
                end = min(stop, offset + len(view))
                yield view[at - offset : end - offset]
                at, index = end, index + 1
            else:
                end = min(stop, offset)
                yield scratch[at - start : end - start]
                at = end


class BlockReader(AbstractContextManager["BlockReader", None]):
    """Reads whole files into memory by several threads, and returns their digests."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(READ_WORKERS, thread_name_prefix="fleet-blocks")
        self._local = threading.local()

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, reader: SharedReader, size: int, into: Extents) -> list[Future[bytes]]:
        """Begin to read a file of ``size`` bytes; the results are its blocks' digests."""
        starts = range(0, max(size, 1), BLOCK_BYTES)
        return [self._pool.submit(self._one, reader, start, min(size, start + BLOCK_BYTES), into) for start in starts]

    def _one(self, reader: SharedReader, start: int, stop: int, into: Extents) -> bytes:
        views = list(into.views(start, stop, self._scratch()))
        reader.into(start, views)
        return block_digest(views)

    def _scratch(self) -> memoryview:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = memoryview(bytearray(BLOCK_BYTES))
        return self._local.scratch  # type: ignore[no-any-return]
