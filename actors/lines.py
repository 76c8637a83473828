"""Connections over asyncio's streams that begin with the proof of the run's secret; :mod:`fleet.host.lines` has them for plain sockets."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import ssl
import struct
from collections.abc import Callable, Collection

from fleet.errors import LineRefused
from fleet.host import lines, secret, tls
from fleet.host.lines import Door, user_of
from fleet.host.refusals import REFUSALS, Refusals
from fleet.protocol.proof import DENIAL, MOST_UNPROVEN, UNPROVEN_S, Asking, Purpose, Reason, Serving

SHUT_S = 1.0
"""So long the end of an encrypted connection may take."""

Begin = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Purpose], None]


def peer_of(writer: asyncio.StreamWriter) -> str:
    """``host:port`` of the other end, for people."""
    name = writer.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name or "")


def give_up_after(writer: asyncio.StreamWriter, unheard_s: float) -> None:
    """Let the kernel end the connection once sent data has not been acknowledged for so long."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unheard_s * 1000))


def unacknowledged_s(writer: asyncio.StreamWriter) -> float:
    """For how long the other end's kernel has not acknowledged sent data; 0.0 when it has acknowledged all."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)  # struct tcp_info, 8 bytes and then words
    unacknowledged, last_ms = struct.unpack_from("I", info, 24)[0], struct.unpack_from("I", info, 56)[0]
    return last_ms / 1e3 if unacknowledged else 0.0


class Reception:
    """A :class:`Door` in asyncio's loop: calls ``begin(reader, writer, purpose)`` for each connection with a valid proof."""

    def __init__(self, host: str, port: int, purposes: Collection[Purpose], begin: Begin) -> None:
        self._loop, self._begin, self._selector = asyncio.get_running_loop(), begin, selectors.DefaultSelector()
        self._purposes = purposes
        self._door = Door(self._selector, host, *purposes, port=port, elsewhere=self._take_encrypted)
        self._entering = set[asyncio.Task[None]]()
        self._handshakes: dict[asyncio.Task[None], str] = {}
        self._later: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._selector, self._turn)  # epoll's own file is ready when one of its files is
        self.port = self._door.port

    async def close(self) -> None:
        """Accept no more connections. ``begin`` has been called for all accepted ones."""
        self._loop.remove_reader(self._selector)
        if self._later is not None:
            self._later.cancel()
        self._door.close()
        self._selector.close()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._entering)
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _turn(self) -> None:
        for key, _ in self._selector.select(0):
            proven = self._door.ready(key.fileobj) if self._door.knows(key.fileobj) else None
            if proven is not None:
                task = self._loop.create_task(self._enter(*proven))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)
        self._door.expire()
        if self._later is not None:
            self._later.cancel()
        wait_s = self._door.wait_s()
        self._later = self._loop.call_later(wait_s, self._turn) if wait_s is not None else None

    async def _enter(self, connection: socket.socket, purpose: Purpose) -> None:
        self._begin(*await asyncio.open_connection(sock=connection), purpose)

    def _take_encrypted(self, connection: socket.socket) -> None:
        """asyncio takes no connection that is encrypted already: it is asked for the handshake, and the proof comes behind that."""
        if len(self._handshakes) >= MOST_UNPROVEN:
            oldest = next(iter(self._handshakes))
            REFUSALS.note(next(iter(self._purposes)), Reason.CROWD, self._handshakes.pop(oldest), "others had not proven themselves either")
            oldest.cancel()
        peer = lines.peer_of(connection)
        task = self._loop.create_task(self._prove_encrypted(connection, peer))
        self._handshakes[task] = peer
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _prove_encrypted(self, connection: socket.socket, peer: str) -> None:
        serving, writer = Serving(secret.held(), self._purposes, secret.nonce()), None
        try:
            async with asyncio.timeout(UNPROVEN_S):
                reader, writer = await _encrypted(connection)
                while not serving.proven:
                    if not (data := await reader.read(serving.missing)):
                        raise LineRefused(Reason.HUNG_UP, "it ended before it had proven anything")
                    writer.write(serving.take(data))
            assert serving.purpose is not None
            self._begin(reader, writer, serving.purpose)
        except (OSError, asyncio.CancelledError) as error:
            if writer is not None:
                writer.transport.abort()
            connection.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            refused = _refused(error)
            REFUSALS.note(serving.purpose or next(iter(self._purposes)), refused.reason, peer, refused.detail)


async def _encrypted(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over a connection that was taken. Raises OSError."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls.server(), ssl_shutdown_timeout=SHUT_S)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _refused(error: OSError) -> LineRefused:
    """The refusal to count and to log."""
    match error:
        case LineRefused():
            return error
        case ssl.SSLError():
            return tls.refusal(error)
        case TimeoutError():
            return LineRefused(Reason.SLOW, f"it did not prove itself within {UNPROVEN_S:g} s")
    return LineRefused(Reason.HUNG_UP, f"{type(error).__name__}: {error}")


async def knock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, purpose: Purpose, limit_s: float = UNPROVEN_S) -> None:
    """The client's half: encrypt where that is needed, prove the secret, and check the other end's proof.

    Raises OSError: LineRefused, or TimeoutError after ``limit_s``.
    """
    asking = Asking(secret.held(), purpose, secret.nonce())
    try:
        async with asyncio.timeout(limit_s):
            if tls.crosses(writer.get_extra_info("socket")):
                await writer.start_tls(tls.client())
            writer.write(asking.hello)
            while asking.missing:
                await _read_proof(reader, writer, asking)
    except ssl.SSLError as error:
        raise tls.refusal(error) from error


async def _read_proof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asking: Asking) -> None:
    data = await reader.read(asking.missing)
    if not data:
        raise LineRefused(Reason.HUNG_UP, "the other end hung up: it speaks another version, or refuses what this is for")
    try:
        writer.write(asking.take(data))
    except LineRefused:
        writer.write(DENIAL)
        raise


def same_user(writer: asyncio.StreamWriter, listener: str, refusals: Refusals = REFUSALS) -> bool:
    """Whether the other end of a Unix socket belongs to this process's user. If not, the connection is closed and counted."""
    pid, uid = user_of(writer.get_extra_info("socket"))
    if uid == os.geteuid():
        return True
    refusals.note(listener, Reason.USER, f"process {pid}", f"it belongs to user {uid}")
    writer.transport.abort()
    return False
