"""gloo's connections between hosts, carried by Fleet's own: with ``--tls``, as gloo encrypts nothing in PyTorch's wheels.

gloo then listens on this machine's loopback alone. Ranks of one host meet there as they always do. For a rank on another host gloo gets an
address on loopback that stands in for it. In gloo the rank with the greater address dials. So the stand-in of a rank that gloo is to dial
is below gloo's own address. The stand-in of a rank that dials this one is above it, and no socket listens there.

A thread listens at the first kind. It also has a connection to the other rank, encrypted, and proven as all connections are. It hands on
bytes, both ways, until either end closes.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
from collections.abc import Callable

from actors.rank.membership.connections import Address
from fleet.host import tls
from fleet.host.lines import Doorkeeper, Knock
from fleet.host.scheduling import be_prompt
from fleet.protocol.proof import Purpose

log = logging.getLogger("fleet.rank")

DIALLED, HOME, DIALS = "127.0.0.1", "127.0.0.2", "127.0.0.3"
"""Where stand-ins are that gloo dials, where gloo itself listens, and where those are that dial it."""
BUFFER_BYTES = 256 << 10
_SOCKADDR = struct.Struct("=H2s4s")


def packed(address: Address) -> bytes:
    """As the kernel's ``sockaddr_in`` begins, which is what gloo tells others of itself."""
    host, port = address
    return _SOCKADDR.pack(socket.AF_INET, port.to_bytes(2, "big"), socket.inet_aton(host))


class Tunnels:
    """Those of one group that forms, for this rank.

    Args:
        host: the address at which ranks of other hosts reach this one.
        rank: this one's, in the group.
        limit_s: for a connection to be there.
        failed: called from any thread, with why a rank of another host cannot be reached.
    """

    def __init__(self, host: str, rank: int, limit_s: float, failed: Callable[[str], None]) -> None:
        self._rank, self._limit_s, self._failed = rank, limit_s, failed
        self._gloo: Address | None = None
        self._listeners: list[socket.socket] = []
        self._lock, self._closed = threading.Lock(), False
        self._door = Doorkeeper(host, Purpose.EXCHANGE, self._taken, "fleet-tunnels", prompt=True)
        self.port = self._door.port

    def lead_to(self, gloo: Address) -> None:
        """This rank's gloo listens there. Ahead of the moment when others hear of this rank."""
        self._gloo = gloo

    def stand_in(self, peer: int, address: Address) -> Address:
        """The address that gloo gets for rank ``peer``, whose own tunnels are at ``address``."""
        if peer > self._rank:
            return DIALS, 1 + peer
        listener = socket.create_server((DIALLED, 0), backlog=1)
        listener.settimeout(self._limit_s)
        found: Address = listener.getsockname()[:2]
        with self._lock:
            self._listeners.append(listener)
        self._start(self._dial, address, listener)  # it closes the listener, perhaps at once
        return found

    def close(self) -> None:
        """No connection comes to be any more; those that are there stay for as long as their ends."""
        with self._lock:
            self._closed, listeners = True, list(self._listeners)
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="fleet-tunnel", daemon=True).start()

    def _dial(self, address: Address, listener: socket.socket) -> None:
        be_prompt(children=False)
        with listener, contextlib.ExitStack() as on_error:
            try:
                far = on_error.enter_context(tls.connect(address, self._limit_s))
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                far.sendall(Knock(far, Purpose.EXCHANGE, limit_s=self._limit_s).proof())
                near, _ = listener.accept()
            except OSError as error:
                if not self._closed:
                    self._failed(f"the rank at {address[0]}:{address[1]} is not reached: {error}")
                return
            on_error.pop_all()
        carry(near, far)

    def _taken(self, far: socket.socket) -> None:
        self._start(self._lead, far)

    def _lead(self, far: socket.socket) -> None:
        be_prompt(children=False)
        assert self._gloo is not None
        try:
            near = socket.create_connection(self._gloo, self._limit_s)
        except OSError as error:
            log.debug("a rank calls, and this group was given up: %s", error)
            far.close()
            return
        carry(near, far)


class _Way:
    """One direction: what has been read of it, and is still to be written."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source, self._target = source, target
        self._room = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self.ended = False

    @property
    def empty(self) -> bool:
        return self._begin == self._end

    def turn(self) -> bool:
        """Read what is there if nothing waits, and write what is taken. Whether anything moved. Raises OSError."""
        moved = self._read() if self.empty and not self.ended else False
        if self.empty:
            return moved
        try:
            self._begin += self._target.send(self._room[self._begin : self._end])
        except BlockingIOError:
            return moved
        return True

    def _read(self) -> bool:
        """Records until the room is full: each is a call."""
        self._begin = self._end = 0
        while self._end < BUFFER_BYTES:
            try:
                count = self._source.recv_into(self._room[self._end :])
            except BlockingIOError:
                break
            if not count:
                self.ended = True
                break
            self._end += count
        return self._end > 0 or self.ended


def carry(near: socket.socket, far: socket.socket) -> None:
    """Hand on bytes between both, until either end closes, and what it has said before is handed on; then close both."""
    waiting = select.poll()
    with near, far:
        for each in (near, far):
            each.setblocking(False)
        out, back = _Way(near, far), _Way(far, near)
        try:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not any(way.ended and way.empty for way in (out, back)):
                moved = [way.turn() for way in (out, back)]
                if not any(moved):
                    waiting.register(near, _events(reads=out, writes=back))
                    waiting.register(far, _events(reads=back, writes=out))
                    waiting.poll()
        except OSError as error:
            log.debug("a tunnel has ended: %s", error)


def _events(reads: _Way, writes: _Way) -> int:
    wanted = select.POLLIN if reads.empty and not reads.ended else 0
    return wanted if writes.empty else wanted | select.POLLOUT
