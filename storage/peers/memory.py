"""The memory of one node in which ranks of other nodes keep copies of their parts, served over TCP.

Files are named ``ID/file``, with ID as in :mod:`storage.checkpoint.manifest`. The last ``STEPS`` IDs are kept. They are the newest
committed one (which has a manifest; or the newest, where none has), and the one being written. A writer of an older history or generation
than one already seen is refused. So a process that wakes after its replacement cannot push out the files of its successors.

A connection begins with the proof of the run's secret. A message is a frame of JSON, then bytes. A file exists once it is complete and each
of its blocks has its writer's digest. The bytes of a writer that dies go with its connection.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet.errors import LineRefused
from fleet.host import tls
from fleet.host.lines import Doorkeeper, peer_of
from fleet.host.refusals import REFUSALS
from fleet.host.wire import LENGTH, checked, frame, receive_into
from fleet.protocol.proof import LIMITS_BYTES, Purpose, Reason
from fleet.protocol.types import Copy
from storage.backends.blocks import BLOCK_BYTES, Segments, block_digest
from storage.backends.files import StoreError, skip
from storage.checkpoint.manifest import MANIFEST, parse_checkpoint_id

STEPS = 2
LARGEST_BLOCK_BYTES = 4 * BLOCK_BYTES
PIECE_BYTES = 256 << 10
"""Refused bytes are read and dropped in pieces of this size."""
SLOW_S = 20.0
"""A peer that sends no byte in the middle of a message, or takes no byte of an answer, for so long is dropped."""
IOV_MAX = 1024
MEMORY_SHARE = 0.5
"""Share of the host's memory; bytes beyond it are refused."""


class Refused(StoreError):
    """The memory refuses it: its writer is overtaken, or there is no room. ``cause`` is ``stale``, ``full`` or ``damaged``."""


@dataclass(frozen=True)
class StoredFile:
    """A complete file: its blocks, each with its digest, and the offset of each."""

    blocks: tuple[memoryview, ...]
    digests: tuple[bytes, ...]
    starts: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.starts[-1]

    def stretch(self, offset: int, count: int) -> Iterator[memoryview]:
        """Bytes ``offset`` to ``offset + count``, or to the end."""
        for start, block in zip(self.starts, self.blocks, strict=False):
            low, high = max(0, offset - start), min(len(block), offset + count - start)
            if low < high:
                yield block[low:high]


@dataclass
class Staged:
    """A file that a writer is sending. It belongs to one connection, and goes with it.

    ``taken_bytes``: its memory, with the current block.
    """

    name: str
    taken_bytes: int = 0
    blocks: dict[int, tuple[memoryview, bytes]] = field(default_factory=dict)

    def whole(self) -> StoredFile:
        if sorted(self.blocks) != list(range(len(self.blocks))):
            raise Refused(self.name, "damaged", f"only its blocks {sorted(self.blocks)} came")
        parts = [self.blocks[number] for number in sorted(self.blocks)]
        starts = tuple(itertools.accumulate((len(block) for block, _ in parts), initial=0))
        return StoredFile(tuple(block for block, _ in parts), tuple(digest for _, digest in parts), starts)


class PeerMemory:
    """Files in this process's memory, for :class:`storage.peers.files.PeerFiles` of any process. Implements ``MemoryPort``.

    Args:
        host: the address at which others reach this node; the port is a free one.
        steps: number of kept IDs; None: all.
        capacity_bytes: files beyond it are refused; None: half of the host's memory.
    """

    def __init__(self, host: str, *, steps: int | None = STEPS, capacity_bytes: int | None = None) -> None:
        self._steps = steps
        self._capacity = capacity_bytes or int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self._files: dict[str, StoredFile] = {}
        self._staged: set[int] = set()
        self._sending = 0
        self._fence = (-1, -1)
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._door = Doorkeeper(host, Purpose.MEMORY, self._receive, "fleet-memory")
        self.address = self._door.address

    def held(self) -> tuple[Copy, ...]:
        """The checkpoints with parts here, oldest first."""
        found: dict[str, set[int]] = {}
        with self._lock:
            for name in self._files:
                directory, file = name.split("/")
                if _parsed(directory) is not None:
                    found.setdefault(directory, set()).update(_part_number(file))
            counts = {directory: self._counts.get(directory, 0) for directory in found}
        return tuple(Copy(each, parse_checkpoint_id(each)[0], tuple(sorted(found[each])), counts[each]) for each in sorted(found))

    def close(self) -> None:
        """Forget all files and stop serving."""
        self._door.close()
        with self._lock:
            connections, self._connections = self._connections, set()
            self._files.clear()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # ---- kept files ----------------------------------------------------------------------------------------------------------------------

    def _held(self) -> int:
        """Bytes of all files, those under way included."""
        return self._sending + sum(stored.size for stored in self._files.values())

    def _begin(self, name: str) -> Staged:
        """Begin a file: refuse a writer that is overtaken, and make room for another step."""
        directory, file = name.split("/")
        parsed = _parsed(directory)
        with self._lock:
            if self._steps is not None and parsed is not None and file != MANIFEST:
                state, generation = parsed
                if (state.history, generation) < self._fence:
                    raise Refused(name, "stale", f"history {self._fence[0]}, generation {self._fence[1]} has written here")
                self._fence = (state.history, generation)
                self._evict(directory, self._steps)
        return Staged(name)

    def _evict(self, writing: str, steps: int) -> None:
        present = sorted({name.split("/")[0] for name in self._files} - {writing})
        committed = [directory for directory in present if f"{directory}/{MANIFEST}" in self._files]
        spared = committed[-1:] or present[-1:]
        doomed = [directory for directory in present if directory not in spared][: max(0, len(present) + 1 - steps)]
        for directory in doomed:
            self._drop(directory)

    def _take(self, staged: Staged, number: int, block: memoryview, digest: bytes) -> None:
        if block_digest([block]) != digest:
            raise Refused(staged.name, "damaged", f"block {number} does not have the digest that was sent with it")
        staged.blocks[number] = (block, digest)

    def _room(self, staged: Staged, size: int) -> memoryview:
        with self._lock:
            if self._held() + size > self._capacity:
                raise Refused(staged.name, "full", f"{self._held()} of {self._capacity} bytes are held, and {size} more were announced")
            self._sending += size
            staged.taken_bytes += size
        return np.empty(size, dtype=np.uint8).data.cast("B")  # numpy asks for huge pages

    def _complete(self, staged: Staged) -> None:
        stored = staged.whole()
        directory, _, file = staged.name.rpartition("/")
        count = _count(stored) if file == MANIFEST else 0
        with self._lock:
            self._files[staged.name] = stored
            if file == MANIFEST:
                self._counts[directory] = count

    def _drop(self, name: str) -> None:
        for each in [each for each in self._files if each == name or each.startswith(f"{name}/")]:
            del self._files[each]
            if each.endswith(f"/{MANIFEST}"):
                self._counts.pop(each.split("/")[0], None)

    # ---- connections ---------------------------------------------------------------------------------------------------------------------

    def _receive(self, connection: socket.socket) -> None:
        if isinstance(connection, tls.TlsSocket):
            connection.settimeout(SLOW_S)  # OpenSSL goes on where the kernel's own limit ends a wait
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # limits of the kernel, so that one call can still wait for a whole block
            connection.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(SLOW_S), 0))
        with self._lock:
            self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), name="fleet-memory-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        session, peer = _Session(self, connection), peer_of(connection)
        try:
            while session.turn():
                continue
        except LineRefused as error:
            REFUSALS.note(Purpose.MEMORY, error.reason, peer, error.detail)
        except (BlockingIOError, TimeoutError):
            REFUSALS.note(Purpose.MEMORY, Reason.SLOW, peer, f"no byte came or went for {SLOW_S:g} s in the middle of a message")
        except OSError:
            return  # the peer is gone
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            REFUSALS.note(Purpose.MEMORY, Reason.FORMAT, peer, f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            session.end()
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Session:
    """One connection: requests in order; at most one file is being written."""

    def __init__(self, memory: PeerMemory, connection: socket.socket) -> None:
        self._memory, self._connection = memory, connection
        self._staged: Staged | None = None
        self._error: StoreError | None = None

    def turn(self) -> bool:
        """Serve one request. False when the peer has hung up."""
        begun = begins(self._connection)
        if not begun:
            return False
        header = receive_header(self._connection, LIMITS_BYTES[Purpose.MEMORY], begun)
        match header["op"]:
            case "write":
                self._answer(lambda: self._write(header["name"]))
            case "block":
                self._block(header)
            case "complete":
                self._answer(self._complete)
            case "read":
                self._read(header)
            case "fetch":
                self._fetch(header["name"])
            case "sizes":
                self._reply({"sizes": self._sizes()})
            case "remove":
                self._remove(header["name"])
            case unknown:
                raise ValueError(f"{unknown!r} is no request")
        return True

    def end(self) -> None:
        if self._staged is not None:
            with self._memory._lock:
                self._memory._sending -= self._staged.taken_bytes
            self._staged = None

    def _reply(self, header: dict[str, Any], data: Sequence[memoryview] = ()) -> None:
        send(self._connection, header, data)

    def _answer(self, work: Any) -> None:
        try:
            work()
        except StoreError as error:
            self.end()
            self._reply({"cause": error.cause, "detail": error.detail})
        else:
            self._reply({})

    def _write(self, name: str) -> None:
        self.end()
        self._error = None
        self._staged = self._memory._begin(name)

    def _block(self, header: dict[str, Any]) -> None:
        """It sends no reply: the writer gets one at the end. Refused bytes are read and dropped."""
        size, staged, room = _size(header["bytes"]), self._staged, None
        if staged is not None and self._error is None:
            try:
                room = self._memory._room(staged, size)
            except StoreError as error:
                self._error = error
        if room is None or staged is None:
            _drain(self._connection, size)
        else:
            receive_into(self._connection, [room])
            try:
                self._memory._take(staged, int(header["number"]), room, bytes.fromhex(header["digest"]))
            except StoreError as error:
                self._error = error

    def _complete(self) -> None:
        if self._error is not None:
            raise self._error
        if self._staged is None:
            raise Refused("", "damaged", "no file was begun on this connection")
        self._memory._complete(self._staged)
        self.end()

    def _find(self, name: str) -> StoredFile | None:
        with self._memory._lock:
            found = self._memory._files.get(name)
        if found is None:
            self._reply({"cause": "missing", "detail": name})
        return found

    def _read(self, header: dict[str, Any]) -> None:
        found = self._find(header["name"])
        if found is not None:
            data = list(found.stretch(header["offset"], header["bytes"]))
            self._reply({"bytes": sum(map(len, data))}, data)

    def _fetch(self, name: str) -> None:
        found = self._find(name)
        if found is not None:
            blocks = [[len(block), digest.hex()] for block, digest in zip(found.blocks, found.digests, strict=True)]
            self._reply({"blocks": blocks}, found.blocks)

    def _sizes(self) -> dict[str, int]:
        with self._memory._lock:
            return {name: stored.size for name, stored in self._memory._files.items()}

    def _remove(self, name: str) -> None:
        with self._memory._lock:
            self._memory._drop(name)
        self._reply({})


def _parsed(directory: str) -> Any:
    try:
        return parse_checkpoint_id(directory)
    except ValueError:
        return None


def _count(manifest: StoredFile) -> int:
    """The number of parts in it; 0 when it cannot be read."""
    try:
        return len(json.loads(b"".join(manifest.blocks))["parts"])
    except (ValueError, KeyError, TypeError):
        return 0


def _part_number(file: str) -> tuple[int, ...]:
    """For DCP's name ``__R_0.distcp``: (R,); for any other file ()."""
    digits = file.removeprefix("__").removesuffix("_0.distcp")
    return (int(digits),) if digits.isdigit() else ()


# ---- the wire ----------------------------------------------------------------------------------------------------------------------------


def send(connection: socket.socket, header: dict[str, Any], data: Segments | Sequence[memoryview] = ()) -> None:
    """Send a header and its bytes."""
    left = [memoryview(frame(json.dumps(header, separators=(",", ":")).encode())), *(memoryview(each).cast("B") for each in data)]
    left = [view for view in left if len(view)]
    while left:
        left = skip(left, connection.sendmsg(left[:IOV_MAX]))


def begins(connection: socket.socket) -> bytes:
    """Wait for the first byte of the next message without a limit; empty when the peer has hung up instead."""
    while True:
        try:
            return connection.recv(1)
        except (BlockingIOError, TimeoutError):  # SO_RCVTIMEO: between messages a peer may take any time
            continue


def receive_header(connection: socket.socket, largest: int, begun: bytes = b"") -> dict[str, Any]:
    """The next header, of at most ``largest`` bytes, of which the caller has read ``begun``.

    Raises ConnectionResetError at the stream's end, LineRefused for other data.
    """
    head = bytearray(begun) + bytearray(LENGTH.size - len(begun))
    receive_into(connection, [memoryview(head)[len(begun) :]])
    body = bytearray(checked(LENGTH.unpack(head)[0], largest))
    receive_into(connection, [memoryview(body)])
    try:
        header = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise LineRefused(Reason.FORMAT, f"a header that is no JSON: {str(error)[:200]}") from error
    if not isinstance(header, dict):
        raise LineRefused(Reason.FORMAT, f"a header is an object, this is {type(header).__name__}")
    return header


def _size(announced: Any) -> int:
    """Bytes of a block. Raises LineRefused when no block has so many."""
    if type(announced) is not int or not 0 <= announced <= LARGEST_BLOCK_BYTES:
        raise LineRefused(Reason.SIZE, f"a block of {announced!r} bytes, at most {LARGEST_BLOCK_BYTES} are taken")
    return announced


def _drain(connection: socket.socket, size: int) -> None:
    """Read and drop ``size`` bytes."""
    piece = memoryview(bytearray(min(size, PIECE_BYTES)))
    while size:
        taken = min(size, len(piece))
        receive_into(connection, [piece[:taken]])
        size -= taken
