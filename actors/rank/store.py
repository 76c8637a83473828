"""The key-value store on which process groups meet.

Fleet's own, because a view change waits for it: torch's TCPStore was seen to take 5 s for about one connection in 25, retries past its
time-out, and cannot be interrupted. This one is a thread of the serving process, and a client that is a plain socket.

A request is ``op, key length, value length, key, value``. ``GET`` names one key or several, apart by line ends: the answer, each value
with its length before it, comes when all are there. Keys begin with ``generation/``; what generations before the last three have left is
dropped. A rank that forms a group computes meanwhile, and so may the one that serves: what counts is how often they wait for each other.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from fleet.cluster.urgency import be_prompt

_REQUEST = struct.Struct("!cII")
_ANSWER = struct.Struct("!I")
SET, GET = b"S", b"G"
KEPT_GENERATIONS = 3
_LONGEST_VALUE = 1 << 24
_SEND_S = 5.0
"""A rank that does not take its answer within this time is dropped: the others wait for it meanwhile."""


def parse_address(store: str) -> tuple[str, int]:
    """``host:port`` -> (host, port). Raises OSError, like the connection that it is for, when it is not of this form."""
    host, _, port = store.rpartition(":")
    if not host or not port.isdigit():
        raise OSError(f"{store!r} is no host:port")
    return host, int(port)


class StoreServer:
    """Serves a store from this process, on a free port, until closed. ``address`` is ``host:port``; ``host`` is where peers find it."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=4096)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._wake, self._woken = socket.socketpair()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[socket.socket, tuple[list[str], set[str]]] = {}  # who waits for these keys, of which those are not there
        self._unread: dict[socket.socket, bytearray] = {}
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
        with selectors.DefaultSelector() as selector, self._listener, self._wake, self._woken:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return self._drop_all(selector)
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._read(selector, key.fileobj)  # type: ignore[arg-type]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread[connection] = bytearray()
        selector.register(connection, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """A connection that has ended, or that speaks another protocol, is dropped."""
        data = b""
        with contextlib.suppress(OSError, ValueError):
            data = connection.recv(1 << 16)
            self._unread[connection] += data
            for op, key, value in _requests(self._unread[connection]):
                self._handle(connection, op, key, value)
            if data:
                return
        self._drop(selector, connection)

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        del self._unread[connection]
        self._waiting.pop(connection, None)
        connection.close()

    def _drop_all(self, selector: selectors.BaseSelector) -> None:
        for connection in list(self._unread):
            self._drop(selector, connection)

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
        answer = b"".join(_ANSWER.pack(len(self._values[key])) + self._values[key] for key in keys)
        try:
            connection.sendall(answer)
        except OSError:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # half an answer is none: the selector will find that it has ended

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
    """Cut whole requests off the front of ``unread``. Raises ValueError when it is not this protocol."""
    while len(unread) >= _REQUEST.size:
        op, key_length, value_length = _REQUEST.unpack_from(unread)
        if op not in (SET, GET) or max(key_length, value_length) > _LONGEST_VALUE:
            raise ValueError("not a store request")
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
        self._socket = socket.create_connection(parse_address(store), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, key: str, value: bytes) -> None:
        self._send(SET, [key], value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once somebody has set it."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, once all are set."""
        self._send(GET, keys, b"")
        return [self._receive(_ANSWER.unpack(self._receive(_ANSWER.size))[0]) for _ in keys]

    def _send(self, op: bytes, keys: Sequence[str], value: bytes) -> None:
        names = "\n".join(f"{self._generation}/{key}" for key in keys).encode()
        self._socket.sendall(_REQUEST.pack(op, len(names), len(value)) + names + value)

    def _receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = self._socket.recv(length - len(data))
            if not piece:
                raise ConnectionResetError("the store has closed the connection")
            data += piece
        return bytes(data)

    def interrupt(self) -> None:
        """Wake a thread that waits in :meth:`get`, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TorchStore(dist.Store):
    """A :class:`StoreClient` as torch's process groups want it."""

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


class Exchange(TorchStore):
    """What gloo wants of a store, in one round trip: it sets one key that ends with its rank, and asks for each rank's, twice.

    Beside what gloo says goes ``mine``; ``learn`` is given each rank's, before gloo hears of that rank.
    """

    def __init__(self, client: StoreClient, prefix: str, size: int, mine: bytes, learn: Callable[[bytes], None]) -> None:
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
                self._learn(value[_ANSWER.size : end])
                self._known[name] = value[end:]
        return self._known[key]


def _plain(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
