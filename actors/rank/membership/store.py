"""The key-value store on which process groups meet.

Fleet has its own, because a view change waits for it. PyTorch's TCPStore took 5 s for about one connection in 25, retries after its
time-out, and cannot be interrupted. This one is a thread of the serving process, and a client that is a plain socket.

A connection begins with the proof of the run's secret; a client's goes out with its first request, after one round trip.

A request is ``op, key length, value length, key, value``. ``GET`` names one or several keys, separated by line ends. The answer, each value
with its length before it, comes when all are there. Keys begin with ``generation/``; keys of generations before the last three are dropped.
The ranks that form a group, and the serving rank, may compute meanwhile. So the number of round trips determines the time.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from fleet.errors import LineRefused
from fleet.host import tls
from fleet.host.lines import Door, Knock, peer_of
from fleet.host.refusals import REFUSALS
from fleet.host.scheduling import be_prompt
from fleet.host.wire import receive_into
from fleet.protocol.proof import ANSWERS_BYTES, LIMITS_BYTES, MIB, Purpose, Reason

_REQUEST = struct.Struct("!cII")
_ANSWER = struct.Struct("!I")
SET, GET = b"S", b"G"
KEPT_GENERATIONS = 3
_SEND_S = 5.0
"""A rank that reads no byte of its answer for so long is dropped."""
_MOST_UNSENT_BYTES = 64 * MIB


@dataclass(slots=True)
class _Caller:
    """A connection with a valid proof: the received part of its next request, the unsent part of its answers, and the time limit for
    that."""

    peer: str
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    until_s: float = 0.0


class StoreServer:
    """Serves a store from this process, on a free port, until closed. ``address`` is ``host:port``; peers connect to ``host``."""

    def __init__(self, host: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._door = Door(self._selector, host, Purpose.STORE)
        self.address = self._door.address
        self._wake, self._woken = socket.socketpair()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[socket.socket, tuple[list[str], set[str]]] = {}  # connection -> (keys it waits for, those not set yet)
        self._callers: dict[socket.socket, _Caller] = {}
        self._generations: list[int] = []
        self._thread = threading.Thread(target=self._serve, name="fleet-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Ranks that are forming on it see their connection close."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _serve(self) -> None:
        be_prompt(children=True)
        with self._selector as selector, self._wake, self._woken:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, events in selector.select(self._wait_s()):
                    if key.fileobj is self._woken:
                        return self._close_all()
                    self._ready(key.fileobj, events)
                self._door.expire()
                self._drop_slow()

    def _ready(self, fileobj: Any, events: int) -> None:
        """Handle an event. A connection that was dropped in the same round is ignored."""
        if self._door.knows(fileobj):
            if (proven := self._door.ready(fileobj)) is not None:
                connection, _ = proven
                self._callers[connection] = _Caller(peer_of(connection))
                self._selector.register(connection, selectors.EVENT_READ)
                self._read(connection)  # its first request may be here already
        elif fileobj in self._callers:
            if events & selectors.EVENT_WRITE:
                self._send(fileobj)
            if events & selectors.EVENT_READ and fileobj in self._callers:
                self._read(fileobj)

    def _wait_s(self) -> float | None:
        ends = [self._door.wait_s(), *(caller.until_s - time.monotonic() for caller in self._callers.values() if caller.unsent)]
        return min((max(0.0, end) for end in ends if end is not None), default=None)

    def _drop_slow(self) -> None:
        now_s = time.monotonic()
        for connection in [connection for connection, caller in self._callers.items() if caller.unsent and caller.until_s <= now_s]:
            self._refuse(connection, LineRefused(Reason.SLOW, f"it took nothing of its answer for {_SEND_S:g} s"))

    def _read(self, connection: socket.socket) -> None:
        """A connection that has ended, or that speaks another protocol, is dropped."""
        try:
            data = connection.recv(1 << 16)
            self._callers[connection].unread += data
            for op, key, value in _requests(self._callers[connection].unread):
                self._handle(connection, op, key, value)
                if connection not in self._callers:
                    return
        except BlockingIOError:
            return
        except LineRefused as error:
            self._refuse(connection, error)
            return
        except OSError:
            data = b""
        except ValueError as error:
            self._refuse(connection, LineRefused(Reason.FORMAT, str(error)))
            return
        if not data:
            self._drop(connection)

    def _refuse(self, connection: socket.socket, error: LineRefused) -> None:
        REFUSALS.note(Purpose.STORE, error.reason, self._callers[connection].peer, error.detail)
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._callers[connection]
        self._waiting.pop(connection, None)
        connection.close()

    def _close_all(self) -> None:
        self._door.close()
        for connection in list(self._callers):
            self._drop(connection)

    def _handle(self, connection: socket.socket, op: bytes, key: str, value: bytes) -> None:
        keys, generation = key.split("\n"), _generation(key)
        if op == SET:
            self._forget_old(generation)
            self._values[key] = value
            for waiting, (wanted, missing) in list(self._waiting.items()):
                missing.discard(key)
                if not missing:
                    self._answer(waiting, wanted)
        elif missing := {key for key in keys if key not in self._values}:
            self._waiting[connection] = keys, missing
        else:
            self._answer(connection, keys)

    def _answer(self, connection: socket.socket, keys: list[str]) -> None:
        self._waiting.pop(connection, None)
        caller = self._callers[connection]
        if not caller.unsent:
            caller.until_s = time.monotonic() + _SEND_S
        caller.unsent += b"".join(_ANSWER.pack(len(self._values[key])) + self._values[key] for key in keys)
        if len(caller.unsent) > _MOST_UNSENT_BYTES:
            self._refuse(connection, LineRefused(Reason.SIZE, f"{len(caller.unsent)} bytes wait to be sent to it"))
        else:
            self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        """Send as much as the socket takes; the selector reports when it takes more."""
        caller = self._callers[connection]
        try:
            sent = connection.send(caller.unsent) if caller.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        if sent:
            del caller.unsent[:sent]
            caller.until_s = time.monotonic() + _SEND_S
        self._selector.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.unsent else 0))

    def _forget_old(self, generation: int) -> None:
        if generation in self._generations:
            return
        self._generations = sorted([*self._generations, generation])[-KEPT_GENERATIONS:]
        oldest = self._generations[0]
        self._values = {key: value for key, value in self._values.items() if _generation(key) >= oldest}
        self._waiting = {waiting: known for waiting, known in self._waiting.items() if _generation(known[0][0]) >= oldest}


def _generation(key: str) -> int:
    return int(key.partition("/")[0])


def _requests(unread: bytearray) -> Iterator[tuple[bytes, str, bytes]]:
    """Cut whole requests off the front of ``unread``. Raises ValueError: no request, LineRefused: too large."""
    while len(unread) >= _REQUEST.size:
        op, key_length, value_length = _REQUEST.unpack_from(unread)
        if op not in (SET, GET):
            raise ValueError("not a store request")
        if max(key_length, value_length) > LIMITS_BYTES[Purpose.STORE]:
            raise LineRefused(Reason.SIZE, f"a key of {key_length} or a value of {value_length} bytes")
        middle, end = _REQUEST.size + key_length, _REQUEST.size + key_length + value_length
        if len(unread) < end:
            return
        request = op, bytes(unread[_REQUEST.size : middle]).decode(), bytes(unread[middle:end])
        del unread[:end]
        yield request


class StoreClient:
    """One rank's connection to a store; all its errors are OSErrors, and each call is bounded by ``timeout_s``."""

    def __init__(self, store: str, generation: int, timeout_s: float) -> None:
        self._generation = generation
        host, _, port = store.rpartition(":")
        self._socket = tls.connect((host, int(port)), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._knock: Knock | None = Knock(self._socket, Purpose.STORE, limit_s=timeout_s)
        except OSError:
            self._socket.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        self._send(SET, [key], value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once a rank has set it."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, once all are set."""
        self._send(GET, keys, b"")
        return [self._receive(_ANSWER.unpack(self._receive(_ANSWER.size))[0]) for _ in keys]

    def _send(self, op: bytes, keys: Sequence[str], value: bytes) -> None:
        names = "\n".join(f"{self._generation}/{key}" for key in keys).encode()
        knock, self._knock = self._knock, None
        proof = knock.proof() if knock is not None else b""
        self._socket.sendall(proof + _REQUEST.pack(op, len(names), len(value)) + names + value)

    def _receive(self, length: int) -> bytes:
        if length > ANSWERS_BYTES[Purpose.STORE]:
            raise LineRefused(Reason.SIZE, f"a value of {length} bytes: this is no store")
        data = bytearray(length)
        receive_into(self._socket, [memoryview(data)])
        return bytes(data)

    def interrupt(self) -> None:
        """Wake a thread that waits in :meth:`get`, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TorchStore(dist.Store):
    """A :class:`StoreClient` with the interface for torch's process groups."""

    def __init__(self, client: StoreClient, prefix: str) -> None:
        super().__init__()
        self._client, self._prefix = client, prefix

    def set(self, key: str, value: Any) -> None:
        self._client.set(f"{self._prefix}/{key}", _plain(value))

    def get(self, key: str) -> bytes:
        return self._client.get(f"{self._prefix}/{key}")

    def wait(self, keys: list[str], *_: Any) -> None:
        for key in keys:
            self.get(key)


class GlooStore(TorchStore):
    """gloo's use of a store, in one round trip: gloo sets one key that ends with its rank, and asks for each rank's key twice.

    ``mine`` travels with gloo's value. ``learn`` gets the ``mine`` of each rank with gloo's value, before gloo gets that value. It returns
    the value for gloo.
    """

    def __init__(self, client: StoreClient, prefix: str, size: int, mine: bytes, learn: Callable[[bytes, bytes], bytes]) -> None:
        super().__init__(client, prefix)
        self._size, self._mine, self._learn = size, mine, learn
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        super().set(key, _ANSWER.pack(len(self._mine)) + self._mine + _plain(value))

    def get(self, key: str) -> bytes:
        if key not in self._known:
            stem = key.rpartition("/")[0]
            keys = [f"{stem}/{rank}" for rank in range(self._size)]
            for name, value in zip(keys, self._client.get_all([f"{self._prefix}/{name}" for name in keys]), strict=True):
                end = _ANSWER.size + _ANSWER.unpack_from(value)[0]
                self._known[name] = self._learn(value[_ANSWER.size : end], value[end:])
        return self._known[key]


def _plain(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
