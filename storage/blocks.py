"""Files as blocks: written and read by several threads, each block hashed beside the transfer.

A file's digest is the SHA-256 of the SHA-256 digests of its blocks of ``BLOCK_BYTES``, in order (a hash tree of depth one): one sequential
SHA-256 over a large file would be slower than the disk.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from storage.points import reach

BLOCK_BYTES = 16 << 20
PIECE_BYTES = 4096
READ_WORKERS = 4


class Sink(Protocol):
    """Where a file's blocks go. ``workers`` is how many blocks may be under way at once; :meth:`block` is called from their threads."""

    workers: int

    def block(self, number: int, data: memoryview) -> None:
        """Store block ``number`` of a file of several; all but the last have BLOCK_BYTES."""
        ...

    def whole(self, data: memoryview) -> None:
        """Store a file of one block."""
        ...


class Reader(Protocol):
    """A file that may be read by several threads at once."""

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one after the other, from ``offset`` on. Raises EOFError where the file ends before, or OSError."""
        ...


def digest_of(blocks: Iterable[bytes]) -> str:
    """The file's digest in hex, from the SHA-256 digests of its blocks."""
    return hashlib.sha256(b"".join(blocks)).hexdigest()


class BlockStream:
    """A file object that is only written to, in order. What is written may change as soon as :meth:`write` returns.

    Large pieces are stored from where they lie; small ones are gathered in at most ``workers + 1`` buffers of BLOCK_BYTES.

    Nothing but :meth:`finish` raises: torch.save, when what it writes to raises, raises a RuntimeError of its own in place of the reason.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink, self._pool = sink, ThreadPoolExecutor(sink.workers, thread_name_prefix="fleet-blocks")
        self._digests: list[Future[bytes]] = []
        self._free: list[bytearray] = []
        self._busy: dict[Future[bytes], bytearray] = {}
        self._buffer, self._filled = bytearray(), 0
        self._position = 0
        self._failed: BaseException | None = None
        self.pieces: dict[int, int] = {}
        """Offset -> bytes of every write of at least PIECE_BYTES."""

    def __enter__(self) -> BlockStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= PIECE_BYTES:
            self.pieces[self._position] = len(view)
        self._position += len(view)
        if self._failed is None:
            try:
                self._put(view)
            except BaseException as error:  # noqa: BLE001 - finish raises it
                self._failed = error
        return len(view)

    def _put(self, view: memoryview) -> None:
        direct: list[Future[bytes]] = []
        at = 0
        while at < len(view):
            if not self._filled and len(view) - at >= BLOCK_BYTES:
                direct.append(self._store(view[at : at + BLOCK_BYTES]))
                at += BLOCK_BYTES
            else:
                at += self._gather(view[at:])
        for done in direct:
            done.result()

    def _gather(self, view: memoryview) -> int:
        """Copy as much as the buffer takes, and hand a full one on."""
        if not self._buffer:
            self._buffer = self._take()
        count = min(len(view), BLOCK_BYTES - self._filled)
        self._buffer[self._filled : self._filled + count] = view[:count]
        self._filled += count
        if self._filled == BLOCK_BYTES:
            self._busy[self._store(memoryview(self._buffer))] = self._buffer
            self._buffer, self._filled = bytearray(), 0
        return count

    def _take(self) -> bytearray:
        if len(self._busy) > self._sink.workers:
            for done in wait(self._busy, return_when=FIRST_COMPLETED).done:
                done.result()
                self._free.append(self._busy.pop(done))
        return self._free.pop() if self._free else bytearray(BLOCK_BYTES)

    def _store(self, data: memoryview) -> Future[bytes]:
        number = len(self._digests)
        self._digests.append(self._pool.submit(self._one, number, data))
        return self._digests[-1]

    def _one(self, number: int, data: memoryview) -> bytes:
        digest = hashlib.sha256(data).digest()
        self._sink.block(number, data)
        return digest

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """What is gathered stays gathered: only :meth:`finish` makes the file whole."""

    def close(self) -> None:
        """The file is closed by :meth:`finish`; whoever was handed this stream must not end it."""

    def finish(self) -> tuple[int, str]:
        """Store what is left. Returns (bytes, digest). Raises OSError when any block was not stored."""
        if self._failed is not None:
            raise self._failed
        rest = memoryview(self._buffer)[: self._filled]
        if not self._digests:
            self._sink.whole(rest)
            return len(rest), digest_of([hashlib.sha256(rest).digest()])
        if self._filled:
            self._store(rest)
        return self._position, digest_of([block.result() for block in self._digests])


class Extents:
    """Which stretches of a file go where in memory; what lies between goes to scratch memory."""

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


class BlockReader:
    """Reads whole files into memory by several threads, and returns their digests."""

    def __init__(self, workers: int = READ_WORKERS) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fleet-blocks")
        self._local = threading.local()

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, reader: Reader, size: int, into: Extents) -> list[Future[bytes]]:
        """Begin to read a file of ``size`` bytes; the results are its blocks' digests."""
        starts = range(0, max(size, 1), BLOCK_BYTES)
        return [self._pool.submit(self._one, reader, start, min(size, start + BLOCK_BYTES), into) for start in starts]

    def _one(self, reader: Reader, start: int, stop: int, into: Extents) -> bytes:
        views = list(into.views(start, stop, self._scratch()))
        reader.into(start, views)
        digest = hashlib.sha256()
        for view in views:
            digest.update(view)
        reach("restore: block read")
        return digest.digest()

    def _scratch(self) -> memoryview:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = memoryview(bytearray(BLOCK_BYTES))
        return self._local.scratch  # type: ignore[no-any-return]
