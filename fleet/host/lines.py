"""Connections over plain sockets that begin with the proof of the run's secret: :mod:`fleet.protocol.proof` for threads and selectors.

A :class:`Door` lets a connection into a loop with a selector once the connection has proven itself; it never waits for one. A
:class:`Doorkeeper` has a thread for that. A :class:`Knock` is the client's half. ``actors.lines`` has both for asyncio.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fleet.errors import LineRefused
from fleet.host import secret, tls
from fleet.host.refusals import REFUSALS
from fleet.host.scheduling import be_prompt
from fleet.protocol.proof import DENIAL, MOST_UNPROVEN, UNPROVEN_S, Asking, Purpose, Reason, Serving

PAUSE_S = 0.05
"""While this process may open no more files, the door accepts no connection for so long."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CREDENTIALS = struct.Struct("3i")
BACKLOG = 4096


def peer_of(connection: socket.socket) -> str:
    """``host:port`` of the other end, for a log; empty where it is gone."""
    try:
        name = connection.getpeername()
    except OSError:
        return ""
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)


def user_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket, as the kernel knows it."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


@dataclass(slots=True)
class _Waiting:
    serving: Serving
    until_s: float
    peer: str


class Door:
    """A listening socket in a loop with a selector, and the connections before it that have not proven themselves yet.

    Args:
        selector: of the loop. When a file of it is ready and :meth:`knows` it, call :meth:`ready`.
        host: the address at which others reach this process.
        purposes: the purposes that a connection may have.
        port: 0: a free one.
        most: most connections before the door; one more pushes out the oldest.
        elsewhere: takes a connection that has to be encrypted, and leads it to its proof; None: not needed.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        host: str,
        *purposes: Purpose,
        port: int = 0,
        most: int = MOST_UNPROVEN,
        elsewhere: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._selector, self._purposes, self._most, self._elsewhere = selector, purposes, most, elsewhere
        self._listening = socket.create_server((host, port), backlog=BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._paused_until_s: float | None = None
        selector.register(self._listening, selectors.EVENT_READ)

    def knows(self, fileobj: object) -> bool:
        """Whether the loop has to call :meth:`ready` for ``fileobj``."""
        return fileobj is self._listening or fileobj in self._waiting

    def ready(self, fileobj: object) -> tuple[socket.socket, Purpose] | None:
        """Go on with ``fileobj``. Returns a connection that has proven its purpose: it does not block, and is in no selector any more.

        Read from it before you wait for it: bytes behind the proof may be in its own memory already.
        """
        if fileobj is self._listening:
            self._accept()
            return None
        assert isinstance(fileobj, socket.socket)
        return self._read(fileobj, self._waiting[fileobj])

    def wait_s(self) -> float | None:
        """Seconds that the loop may wait before it calls :meth:`expire`; None: without limit."""
        ends = [self._paused_until_s] if self._paused_until_s is not None else []
        ends += [next(iter(self._waiting.values())).until_s] if self._waiting else []
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def expire(self) -> None:
        """Refuse connections that take too long. Call it after each wait."""
        now_s = time.monotonic()
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._listening, selectors.EVENT_READ)
        while self._waiting and (first := next(iter(self._waiting.items())))[1].until_s <= now_s:
            self._turn_away(first[0], Reason.SLOW, f"it did not prove itself within {UNPROVEN_S:g} s")

    def close(self) -> None:
        """Stop listening, and close the connections that have not proven themselves."""
        if self._paused_until_s is None:
            self._selector.unregister(self._listening)
        self._listening.close()
        for connection in list(self._waiting):
            self._leave(connection)
            connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in FULL:
                self._make_room()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._elsewhere is not None and tls.crosses(connection):
            self._elsewhere(connection)
            return
        peer = peer_of(connection)
        try:
            connection = tls.accepted(connection)
        except OSError:  # it is gone already
            connection.close()
            return
        if len(self._waiting) >= self._most:
            self._turn_away(next(iter(self._waiting)), Reason.CROWD, f"{self._most} others had not proven themselves either")
        serving = Serving(secret.held(), self._purposes, secret.nonce())
        self._waiting[connection] = _Waiting(serving, time.monotonic() + UNPROVEN_S, peer)
        self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """The process may open no more files. The oldest unproven connection goes; without one, the door stops listening for a while."""
        if self._waiting:
            self._turn_away(next(iter(self._waiting)), Reason.CROWD, "this process may open no more files")
        else:
            self._selector.unregister(self._listening)
            self._paused_until_s = time.monotonic() + PAUSE_S

    def _read(self, connection: socket.socket, waiting: _Waiting) -> tuple[socket.socket, Purpose] | None:
        try:
            data = connection.recv(waiting.serving.missing)
            if not data:
                raise LineRefused(Reason.HUNG_UP, "it ended before it had proven anything")
            answer = waiting.serving.take(data)
            if answer and connection.send(answer) < len(answer):
                raise LineRefused(Reason.SLOW, "it does not take the answer")
        except BlockingIOError:
            return None
        except LineRefused as error:
            self._turn_away(connection, error.reason, error.detail)
            return None
        except OSError as error:
            self._turn_away(connection, Reason.HUNG_UP, f"{type(error).__name__}: {error}")
            return None
        purpose = waiting.serving.purpose
        if not waiting.serving.proven or purpose is None:
            return None
        self._leave(connection)
        return connection, purpose

    def _leave(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]

    def _turn_away(self, connection: socket.socket, reason: str, detail: str) -> None:
        waiting = self._waiting[connection]
        REFUSALS.note(waiting.serving.purpose or self._purposes[0], reason, waiting.peer, detail)
        self._leave(connection)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the kernel keeps no state of it
        connection.close()


class Doorkeeper:
    """A :class:`Door` with a thread of its own, which gives each connection that has proven itself to ``enter``; it blocks again.

    Args:
        host: the address at which others reach this process; the port is a free one.
        purpose: what connections are for.
        enter: called in that thread; it does not wait.
        name: of the thread.
        prompt: everyone waits for it, and for threads that ``enter`` starts.
    """

    def __init__(self, host: str, purpose: Purpose, enter: Callable[[socket.socket], None], name: str, *, prompt: bool = False) -> None:
        self._selector, self._enter, self._prompt = selectors.DefaultSelector(), enter, prompt
        self._door = Door(self._selector, host, purpose)
        self.port, self.address = self._door.port, self._door.address
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._let_in, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """When this returns, no connection is let in any more."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _let_in(self) -> None:
        if self._prompt:
            be_prompt(children=True)
        with self._selector as selector, self._wake, self._woken, contextlib.closing(self._door) as door:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(door.wait_s()):
                    if key.fileobj is self._woken:
                        return
                    proven = door.ready(key.fileobj) if door.knows(key.fileobj) else None
                    if proven is not None:
                        proven[0].setblocking(True)
                        self._enter(proven[0])
                door.expire()


class Knock:
    """The client's half on a connected, blocking socket. It says hello at once; the proof goes out together with the first request.

    Raises OSError: LineRefused when the other end does not hold this run's secret, TimeoutError when it does not answer within ``limit_s``.
    """

    def __init__(self, stream: socket.socket, purpose: Purpose, run_secret: bytes | None = None, limit_s: float = UNPROVEN_S) -> None:
        self._stream, self._limit_s = stream, limit_s
        self._asking = Asking(run_secret or secret.held(), purpose, secret.nonce())
        stream.sendall(self._asking.hello)

    def proof(self) -> bytes:
        """Wait for the other end's proof. Returns this side's proof, to be sent before any other byte."""
        before_s, until_s = self._stream.gettimeout(), time.monotonic() + self._limit_s
        proof = b""
        try:
            while self._asking.missing:
                self._stream.settimeout(max(0.001, until_s - time.monotonic()))
                data = self._stream.recv(self._asking.missing)
                if not data:
                    raise LineRefused(Reason.HUNG_UP, "the other end hung up: it speaks another version, or refuses this purpose")
                proof = self._take(data)
        finally:
            self._stream.settimeout(before_s)
        return proof

    def _take(self, data: bytes) -> bytes:
        try:
            return self._asking.take(data)
        except LineRefused:
            with contextlib.suppress(OSError):
                self._stream.sendall(DENIAL)
            raise
