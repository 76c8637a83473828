"""Latency and bandwidth between two nodes, measured over plain TCP.

This module uses only the standard library, without Fleet: Ray sends it by value to nodes where Fleet is not installed. Both ends prove that
they know a secret, drawn for one measurement, before they read other data.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import socketserver
import statistics
import struct
import threading
import time

LIMIT_S = 10.0
"""No wait on a socket is longer."""
NONCE, PROOF = 16, 32
BLOCK = 1 << 20
MESSAGE = 64
MOST_TRIPS, MOST_BULK_S = 10_000, 10.0
ASK = "!BId"
"""A request: one of ``PING``, ``TAKE`` and ``GIVE``, the number of round trips, and the seconds."""
COUNT = "!Q"
PING, TAKE, GIVE = range(3)


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, role + nonces, hashlib.sha256).digest()


def _exactly(line: socket.socket, count: int) -> bytes:
    """Raises ConnectionError when the line ends before."""
    data = bytearray()
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            raise ConnectionError("the other end hung up")
        data += more
    return bytes(data)


def _pour(line: socket.socket, seconds: float) -> None:
    block, until_s = memoryview(bytes(BLOCK)), time.monotonic() + seconds
    while time.monotonic() < until_s:
        line.sendall(block)
    line.shutdown(socket.SHUT_WR)


def _drain(line: socket.socket, limit_s: float) -> int:
    """Count the bytes until the other end closes its side. Raises TimeoutError when that takes longer than ``limit_s``."""
    buffer, count, until_s = bytearray(BLOCK), 0, time.monotonic() + limit_s
    while got := line.recv_into(buffer):
        count += got
        if time.monotonic() > until_s:
            raise TimeoutError(f"data came for more than {limit_s:g} s")
    return count


class _Serve(socketserver.BaseRequestHandler):
    """Answers one connection."""

    server: _Server

    def handle(self) -> None:
        line: socket.socket = self.request
        line.settimeout(LIMIT_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # the client sees the end of the connection, and reports it
            if self._proven(line):
                self._answer(line, *struct.unpack(ASK, _exactly(line, struct.calcsize(ASK))))

    def _proven(self, line: socket.socket) -> bool:
        secret, nonces = self.server.secret, _exactly(line, NONCE)
        mine = os.urandom(NONCE)
        nonces += mine
        line.sendall(mine + _proof(secret, b"answers", nonces))
        return hmac.compare_digest(_exactly(line, PROOF), _proof(secret, b"asks", nonces))

    def _answer(self, line: socket.socket, what: int, trips: int, seconds: float) -> None:
        if what == PING:
            for _ in range(min(trips, MOST_TRIPS)):
                line.sendall(_exactly(line, MESSAGE))
        elif what == TAKE:
            line.sendall(struct.pack(COUNT, _drain(line, MOST_BULK_S + LIMIT_S)))
        elif what == GIVE and 0 <= seconds <= MOST_BULK_S:
            _pour(line, seconds)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, secret: bytes) -> None:
        self.secret = secret
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Serve)


class LinkEnd:
    """One node's end: it answers others, and measures on request. In Ray it is an actor that is pinned to its node.

    Args:
        host: the address at which other nodes reach this one; it listens there and nowhere else.
        secret: what both ends must know.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._server = _Server(host, secret)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="fleet-link", daemon=True)
        self._thread.start()

    def port(self) -> int:
        return int(self._server.server_address[1])

    def variable(self, name: str) -> str:
        """A variable of the environment of this node's processes; empty when it is not set."""
        return os.environ.get(name, "")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def measure(self, host: str, port: int, trips: int = 100, bulk_s: float = 0.5) -> tuple[float, float, float]:
        """(median round trip of 64 bytes in seconds, bytes per second there, bytes per second back). Raises OSError.

        Args:
            trips: round trips, after some that are not counted.
            bulk_s: for how long data is sent, each way.
        """
        with self._asked(host, port, PING, trips + trips // 10, 0.0) as line:
            took_s = [_round_trip_s(line) for _ in range(trips + trips // 10)]
        return statistics.median(took_s[trips // 10 :]), self._there(host, port, bulk_s), self._back(host, port, bulk_s)

    def _there(self, host: str, port: int, bulk_s: float) -> float:
        with self._asked(host, port, TAKE, 0, bulk_s) as line:
            start_s = time.monotonic()
            _pour(line, bulk_s)
            return float(struct.unpack(COUNT, _exactly(line, struct.calcsize(COUNT)))[0]) / (time.monotonic() - start_s)

    def _back(self, host: str, port: int, bulk_s: float) -> float:
        with self._asked(host, port, GIVE, 0, bulk_s) as line:
            start_s = time.monotonic()
            return _drain(line, bulk_s + LIMIT_S) / (time.monotonic() - start_s)

    def _asked(self, host: str, port: int, what: int, trips: int, seconds: float) -> socket.socket:
        """A connection after the proofs of both ends and this request."""
        with contextlib.ExitStack() as on_error:
            line = on_error.enter_context(socket.create_connection((host, port), LIMIT_S))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine = os.urandom(NONCE)
            line.sendall(mine)
            theirs = _exactly(line, NONCE)
            if not hmac.compare_digest(_exactly(line, PROOF), _proof(self._secret, b"answers", mine + theirs)):
                raise ConnectionError("the process that listens there does not know the secret of this measurement")
            line.sendall(_proof(self._secret, b"asks", mine + theirs) + struct.pack(ASK, what, trips, seconds))
            on_error.pop_all()
            return line


def _round_trip_s(line: socket.socket) -> float:
    start_s = time.perf_counter()
    line.sendall(bytes(MESSAGE))
    _exactly(line, MESSAGE)
    return time.perf_counter() - start_s
