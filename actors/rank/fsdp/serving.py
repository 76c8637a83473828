"""Ranks serve each other stretches of parameters while a step is computed.

Parameters do not change between two commits. So a rank that keeps a stretch sends it to any rank that asks, at any time. The other ranks
need not take part, as they must in an all-gather. A slower rank, or one with more shards, delays no other rank. One rank alone may
evaluate. When an owner is lost in the middle of a forward, a rank asks a guard in its place.

A connection begins with the proof of the run's secret, and stays. A fetch is one request and one answer. The request has token, state, flat
buffer, range and type. The answer is a byte for yes, the elements, and a byte that says whether they are unchanged. Contributions to this
rank come on such connections, too: their elements follow the request, and the answer is one byte. See :mod:`actors.rank.fsdp.sending`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from actors.rank.telemetry.usage import RECEIVED, SENT
from fleet.host import tls
from fleet.host.lines import Doorkeeper, Knock
from fleet.host.wire import receive_into
from fleet.protocol.chunks import Turn
from fleet.protocol.proof import Purpose
from fleet.protocol.types import StateId

log = logging.getLogger("fleet.rank")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types in which parameters are served, by their number in a request. A rank that computes in a narrower type asks for that type."""
YES, NO = b"\1", b"\0"
TOKEN_BYTES = 16
REACH_S = 1.0
"""Time limit of one attempt to connect."""
LOOK_S = 0.05
"""Interval at which a rank that waits for a stretch checks whether it is called away."""


class Address(NamedTuple):
    """The address at which a rank serves, and the token that each request needs."""

    host: str
    port: int
    token: bytes

    def packed(self) -> bytes:
        return self.token + struct.pack(">H", self.port) + self.host.encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Address:
        port = struct.unpack_from(">H", data, TOKEN_BYTES)[0]
        return cls(data[TOKEN_BYTES + 2 :].rstrip(b"\0").decode(), port, data[:TOKEN_BYTES])


class PeerRequest(NamedTuple):
    """A request for elements ``lo..hi`` of a flat buffer of ``state``, or a contribution of such elements, which follow it.

    Attributes:
        kind: number of the wanted type in :data:`TYPES`.
        contribution: elements follow. Only then the next two fields count.
        turn: the view and the attempt at the step to which it belongs.
        shard: the shard of the gradient; :data:`SUM`: it is the mean over all shards.
    """

    state: StateId
    flat: int
    lo: int
    hi: int
    kind: int = 0
    contribution: bool = False
    turn: Turn = Turn(-1, 0)
    shard: int = -1

    def packed(self, token: bytes) -> bytes:
        place = self.state.history, self.state.step, self.flat, self.lo, self.hi
        return WIRE.pack(token, self.kind, self.contribution, *place, *self.turn, self.shard)

    @classmethod
    def unpacked(cls, data: bytes | bytearray) -> tuple[bytes, PeerRequest]:
        """(token, request)."""
        token, kind, contributes, history, step, flat, lo, hi, generation, attempt, shard = WIRE.unpack(data)
        return token, cls(StateId(history, step), flat, lo, hi, kind, contributes, Turn(generation, attempt), shard)


WIRE = struct.Struct(">16sB?8q")


class FetchRequest(NamedTuple):
    """A fetch of elements ``lo..hi`` of a flat buffer. ``into``: a flat tensor of that length and the wanted type, in host memory."""

    flat: int
    lo: int
    hi: int
    into: torch.Tensor


class Served(NamedTuple):
    """The answer to a fetch: elements as a flat tensor, and a function that says whether they are unchanged."""

    elements: torch.Tensor
    unchanged: Callable[[], bool]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor, by its address; keep the tensor meanwhile. Storage that numpy has seen could not be resized."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def reached(address: Address, limit_s: float, proof_s: float) -> socket.socket:
    """A connection to the server at that address, on which both ends have proven themselves. Raises OSError.

    Args:
        limit_s: for the kernel of that host to answer.
        proof_s: for the process, which may be short of a core.
    """
    connection = tls.connect((address.host, address.port), limit_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(Knock(connection, Purpose.PARAMETERS, limit_s=proof_s).proof())
    except OSError:
        connection.close()
        raise
    return connection


class ContributionSink(Protocol):
    """Takes contributions, from any thread."""

    def room(self, request: PeerRequest) -> torch.Tensor:
        """Memory for the elements of a contribution: flat, on the host. Raises OSError for a buffer or range that this rank does not
        have."""

    def take(self, request: PeerRequest, elements: torch.Tensor) -> bool:
        """Take the elements of a contribution. False: they are of no use. It may wait a while."""


class PeerServer:
    """Serves fetches from threads of its own, until it is closed.

    Args:
        host: the address of this rank's node.
        find: (state, flat buffer, from, to) -> the answer; None: this rank does not have the elements. It may wait a while.
        keep: takes contributions.
    """

    def __init__(self, host: str, find: Callable[[StateId, int, int, int], Served | None], keep: ContributionSink) -> None:
        self._find, self._keep, self._token = find, keep, secrets.token_bytes(TOKEN_BYTES)
        self._connections: set[socket.socket] = set()
        self._door = Doorkeeper(host, Purpose.PARAMETERS, self._let_in, "fleet-server", prompt=True)
        self.address = Address(host, self._door.port, self._token)

    def close(self) -> None:
        self._door.close()
        for each in list(self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _let_in(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), name="fleet-serves", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one peer's requests, in order. A peer without the token gets no answer."""
        with contextlib.suppress(OSError), connection:
            data = bytearray(WIRE.size)
            while True:
                receive_into(connection, [memoryview(data)])
                token, request = PeerRequest.unpacked(data)
                if not secrets.compare_digest(token, self._token) or request.kind >= len(TYPES):
                    return
                if request.contribution:
                    self._accept_contribution(connection, request)
                else:
                    self._send(connection, request)
        self._connections.discard(connection)

    def _send(self, connection: socket.socket, request: PeerRequest) -> None:
        found = self._find(request.state, request.flat, request.lo, request.hi)
        if found is None:
            connection.sendall(NO)
            return
        elements = found.elements.to(TYPES[request.kind]).cpu()
        SENT.count(elements.nbytes)
        connection.sendall(YES)
        connection.sendall(bytes_of(elements))
        connection.sendall(YES if found.unchanged() else NO)

    def _accept_contribution(self, connection: socket.socket, request: PeerRequest) -> None:
        room = self._keep.room(request)
        receive_into(connection, [bytes_of(room)])
        RECEIVED.count(room.nbytes)
        connection.sendall(YES if self._keep.take(request, room) else NO)


class PeerFetcher:
    """Makes fetches, on one connection to each server. It belongs to one thread at a time.

    Args:
        patience: seconds for which a server may be silent, as of now: fewer when the view is about to change.
        most_s: the most that ``patience`` gives.
    """

    def __init__(self, patience: Callable[[], float], most_s: float) -> None:
        self._patience, self._most_s = patience, most_s
        self._connections: dict[Address, socket.socket] = {}

    def fetch(self, state: StateId, stretches: Sequence[tuple[Address, FetchRequest]]) -> list[int]:
        """Fill each request from its server, all servers at once. Returns the numbers of requests that their server could not fill."""
        asked = [self._ask(state, address, wanted) for address, wanted in stretches]
        return [number for number, (address, wanted) in enumerate(stretches) if not self._take(address, asked[number], wanted)]

    def close(self) -> None:
        for address in list(self._connections):
            self._drop(address)

    def _ask(self, state: StateId, address: Address, wanted: FetchRequest) -> socket.socket | None:
        try:
            connection = self._connections.get(address) or self._connect(address)
            connection.sendall(PeerRequest(state, wanted.flat, wanted.lo, wanted.hi, TYPES.index(wanted.into.dtype)).packed(address.token))
        except OSError as error:
            log.info("no stretch of the parameters from %s:%d: %s", address.host, address.port, error)
            self._drop(address)
            return None
        return connection

    def _connect(self, address: Address) -> socket.socket:
        connection = self._reach(address)
        connection.settimeout(LOOK_S)
        self._connections[address] = connection
        return connection

    def _reach(self, address: Address) -> socket.socket:
        began_s = time.monotonic()
        while True:
            try:
                limit_s = min(REACH_S, self._most_s)
                return reached(address, limit_s, limit_s)
            except TimeoutError:  # the host is silent
                if time.monotonic() - began_s > self._patience():
                    raise

    def _take(self, address: Address, connection: socket.socket | None, wanted: FetchRequest) -> bool:
        if connection is None or self._connections.get(address) is not connection:  # another request of the same server has failed
            return False
        answer = bytearray(1)
        try:
            self._fill(connection, memoryview(answer))
            if bytes(answer) == NO:
                return False
            self._fill(connection, bytes_of(wanted.into))
            self._fill(connection, memoryview(answer))
        except OSError as error:
            log.info("no stretch of the parameters from %s:%d: %s", address.host, address.port, error)
            self._drop(address)  # late bytes on it would belong to no request
            return False
        RECEIVED.count(wanted.into.nbytes)
        return bytes(answer) == YES

    def _fill(self, connection: socket.socket, into: memoryview) -> None:
        at, last_s = 0, time.monotonic()
        while at < len(into):
            try:
                count = connection.recv_into(into[at:])
            except TimeoutError:
                if time.monotonic() - last_s > self._patience():
                    raise
                continue
            if not count:
                raise ConnectionError("the connection has ended")
            at, last_s = at + count, time.monotonic()

    def _drop(self, address: Address) -> None:
        if (connection := self._connections.pop(address, None)) is not None:
            connection.close()
