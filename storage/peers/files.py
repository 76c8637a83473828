"""Files in the memories of nodes, ``peers://HOST:PORT,HOST:PORT``: writes go to all of them, reads to any that has the file.

A write succeeds when every named memory holds the file, verified. Reads skip a memory that does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from fleet.host import tls
from fleet.host.lines import Knock
from fleet.host.wire import receive_into
from fleet.protocol.levels import PEERS_SCHEME
from fleet.protocol.proof import ANSWERS_BYTES, Purpose
from storage.backends.blocks import Segments, SharedReader, Sink, block_digest
from storage.backends.files import StoreError, put
from storage.peers.memory import LARGEST_BLOCK_BYTES, Refused, receive_header, send

CONNECT_S, ANSWER_S = 3.0, 20.0
WORKERS = 2

T = TypeVar("T")


class Peer:
    """One memory, with connections that are kept for the next call. Its errors are OSErrors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """A connection for one exchange; it is not used again when the block raises."""
        stream = self._connect()
        try:
            yield stream
        except BaseException as error:
            stream.close()
            if isinstance(error, OSError) and not isinstance(error, StoreError | FileNotFoundError | EOFError):
                cause = "timeout" if isinstance(error, TimeoutError) else "unreachable"
                raise StoreError(self.address, cause, f"{type(error).__name__}: {error}") from error
            raise
        with self._lock:
            self._idle.append(stream)

    def _connect(self) -> socket.socket:
        with self._lock:
            while self._idle:
                stream = self._idle.pop()
                if _quiet(stream):
                    return stream
                stream.close()
        host, _, port = self.address.rpartition(":")
        try:
            stream = tls.connect((host, int(port)), CONNECT_S)
        except (OSError, ValueError) as error:
            raise StoreError(self.address, "unreachable", f"{type(error).__name__}: {error}") from error
        try:
            stream.settimeout(ANSWER_S)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.sendall(Knock(stream, Purpose.MEMORY).proof())
        except OSError as error:
            stream.close()
            raise StoreError(self.address, "unreachable", f"{type(error).__name__}: {error}") from error
        return stream

    def ask(self, **header: Any) -> dict[str, Any]:
        """One request without bytes."""
        with self.connection() as stream:
            send(stream, header)
            return self.answer(stream)

    def answer(self, stream: socket.socket) -> dict[str, Any]:
        """The reply. Raises the error that the memory sends."""
        header = receive_header(stream, ANSWERS_BYTES[Purpose.MEMORY])
        code = header.get("cause")
        if code == "missing":
            raise FileNotFoundError(f"{header['detail']} is not in the memory at {self.address}")
        if code is not None:
            raise Refused(self.address, code, header["detail"])
        return header

    def close(self) -> None:
        with self._lock:
            for stream in self._idle:
                stream.close()
            self._idle.clear()


def _quiet(stream: socket.socket) -> bool:
    """Whether an idle connection is still open: the peer has sent nothing on it, and has not hung up."""
    waiting = select.poll()
    waiting.register(stream, select.POLLIN)
    return not waiting.poll(0)


@functools.lru_cache(maxsize=256)
def peer(address: str) -> Peer:
    """The one client of a memory in this process."""
    one = Peer(address)
    atexit.register(one.close)
    return one


class PeerFiles:
    """Files under ``peers://HOST:PORT,...``; a memory holds only checkpoints. See :class:`storage.backends.files.Files`."""

    def __init__(self, url: str) -> None:
        hosts, self._url = url.removeprefix(PEERS_SCHEME).partition("/")[0], url
        self._peers = [peer(address) for address in hosts.split(",") if address]
        if not self._peers:
            raise StoreError(url, "bucket", f"it must be {PEERS_SCHEME}HOST:PORT, or several of them")

    # ---- writing -------------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        with contextlib.ExitStack() as stack:
            streams = [(each, stack.enter_context(each.connection())) for each in self._peers]
            for _, stream in streams:
                send(stream, {"op": "write", "name": name})
            for each, stream in streams:
                each.answer(stream)
            yield _PeerSink([stream for _, stream in streams])
            for _, stream in streams:
                send(stream, {"op": "complete"})
            for each, stream in streams:
                each.answer(stream)

    def create(self, name: str, data: bytes) -> bool:
        """The coordinator of the one run of these memories alone writes there."""
        put(self, name, data)
        return True

    def note(self, name: str, data: bytes) -> None:
        put(self, name, data)

    # ---- reading -------------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, name: str) -> Iterator[SharedReader]:
        yield _PeerReader(self._holders(name), name)

    def read(self, name: str) -> bytes:
        return b"".join(bytes(block) for block in self.fetch(name))

    def fetch(self, name: str) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The written blocks, each compared with its digest. A memory that fails is skipped while another has the file."""
        return _first(self._holders(name), lambda holder: _fetched(holder, name))

    def size(self, name: str) -> int | None:
        sizes = [sizes[name] for _, sizes in self._listings() if name in sizes]
        return sizes[0] if sizes else None

    def sizes(self, directory: str) -> dict[str, int]:
        prefix = f"{directory}/"
        listings = [sizes for _, sizes in self._listings()]
        return {name[len(prefix) :]: size for sizes in listings for name, size in sizes.items() if name.startswith(prefix)}

    def directories(self) -> list[str]:
        return sorted({name.split("/")[0] for _, sizes in self._listings() for name in sizes})

    def _holders(self, name: str) -> list[Peer]:
        holders = [each for each, sizes in self._listings() if name in sizes]
        if not holders:
            raise FileNotFoundError(f"{name} is in none of the memories at {self._url}")
        return holders

    def _listings(self) -> list[tuple[Peer, dict[str, int]]]:
        """The files of each memory that answers. Raises OSError when none does."""
        found, failed = [], None
        for each in self._peers:
            try:
                found.append((each, each.ask(op="sizes")["sizes"]))
            except StoreError as error:
                failed = error
        if failed is not None and not found:
            raise failed
        return found

    # ---- removing ------------------------------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        for each, _ in self._listings():
            each.ask(op="remove", name=name)

    def unfinished(self) -> list[tuple[str, Callable[[], None]]]:
        return []  # the files of a dead writer went with its connection


class _PeerSink:
    """The same blocks to every memory: one connection each, used in turn by the threads that have a block ready."""

    workers = WORKERS

    def __init__(self, streams: Sequence[socket.socket]) -> None:
        self._streams = [(stream, threading.Lock()) for stream in streams]

    def block(self, number: int, data: Segments) -> None:
        header = {"op": "block", "number": number, "bytes": sum(len(each) for each in data), "digest": block_digest(data).hex()}
        for stream, lock in self._streams:
            with lock:
                send(stream, header, data)

    def whole(self, data: Segments) -> None:
        self.block(0, data)


class _PeerReader:
    def __init__(self, holders: Sequence[Peer], name: str) -> None:
        self._holders, self._name = holders, name

    def into(self, offset: int, views: Sequence[memoryview]) -> None:
        _first(self._holders, lambda holder: self._into(holder, offset, views))

    def _into(self, holder: Peer, offset: int, views: Sequence[memoryview]) -> None:
        size = sum(len(view) for view in views)
        with holder.connection() as stream:
            send(stream, {"op": "read", "name": self._name, "offset": offset, "bytes": size})
            come = holder.answer(stream)["bytes"]
            if come < size:
                raise EOFError(f"{self._name} ends at byte {offset + come}")
            receive_into(stream, views)


def _fetched(holder: Peer, name: str) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    with holder.connection() as stream:
        send(stream, {"op": "fetch", "name": name})
        described = holder.answer(stream)["blocks"]
        if any(size > LARGEST_BLOCK_BYTES for size, _ in described):
            raise Refused(holder.address, "damaged", f"a block of {name} has more than {LARGEST_BLOCK_BYTES} bytes")
        blocks = [np.empty(size, dtype=np.uint8) for size, _ in described]
        receive_into(stream, [block.data for block in blocks])
    for number, (block, (_, digest)) in enumerate(zip(blocks, described, strict=True)):
        if block_digest([block.data]).hex() != digest:
            raise Refused(holder.address, "damaged", f"block {number} of {name} does not have its digest")
    return blocks


def _first(holders: Sequence[Peer], work: Callable[[Peer], T]) -> T:
    """The result of the first of ``holders`` that does not fail. Raises the error of the last one."""
    for number, holder in enumerate(holders):
        try:
            return work(holder)
        except OSError:
            if number == len(holders) - 1:
                raise
    raise FileNotFoundError("no memory holds it")
