"""Lines over asyncio's streams that begin with the proof of the run's secret; :mod:`fleet.cluster.lines` is the same for plain sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Collection

from fleet.cluster import secret
from fleet.cluster.lines import user_of
from fleet.cluster.refusals import REFUSALS, Refusals
from fleet.errors import LineRefused
from fleet.protocol.proof import DENIAL, UNPROVEN_S, Asking, Purpose, Reason, Serving

MOST_UNPROVEN = 256
"""asyncio reads up to 256 KiB of each before anybody asks for it: fewer than where sockets are read by ourselves."""


def peer_of(writer: asyncio.StreamWriter) -> str:
    """``host:port`` of the other end, for people."""
    name = writer.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name or "")


def give_up_after(writer: asyncio.StreamWriter, unheard_s: float) -> None:
    """Let the kernel end the connection once something that was sent has not been acknowledged for so long."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unheard_s * 1000))


def unacknowledged_s(writer: asyncio.StreamWriter) -> float:
    """For how long the other end's kernel has acknowledged nothing of what it was sent; 0.0 when it has acknowledged all."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)  # struct tcp_info, 8 bytes and then words
    unacknowledged, last_ms = struct.unpack_from("I", info, 24)[0], struct.unpack_from("I", info, 56)[0]
    return last_ms / 1e3 if unacknowledged else 0.0


class Reception:
    """Lets connections of a listener in once they have proven themselves.

    Args:
        purposes: what connections may be for.
        unproven_s: how long one may take to prove itself.
        most: how many may be at it; one more pushes out the oldest.
        refusals: where is counted who was turned away.
    """

    def __init__(
        self, purposes: Collection[Purpose], *, unproven_s: float = UNPROVEN_S, most: int = MOST_UNPROVEN, refusals: Refusals = REFUSALS
    ) -> None:
        self._purposes, self._unproven_s, self._most, self._refusals = tuple(purposes), unproven_s, most, refusals
        self._waiting: dict[asyncio.StreamWriter, None] = {}

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Purpose | None:
        """What the connection is for, once it has proven itself; None, and it is closed, when it does not."""
        serving = Serving(secret.held(), self._purposes, secret.nonce())
        self._make_room()
        self._waiting[writer] = None
        try:
            async with asyncio.timeout(self._unproven_s):
                await self._receive(serving, reader, writer)
        except LineRefused as error:
            self._turn_away(serving, writer, error.reason, error.detail)
        except TimeoutError:
            self._turn_away(serving, writer, Reason.SLOW, f"it did not prove itself within {self._unproven_s:g} s")
        except OSError as error:
            self._turn_away(serving, writer, Reason.HUNG_UP, str(error))
        finally:
            self._waiting.pop(writer, None)
        return serving.purpose if serving.proven else None

    async def _receive(self, serving: Serving, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while serving.missing:
            data = await reader.read(serving.missing)
            if not data:
                raise LineRefused(Reason.HUNG_UP, "it ended before it had proven anything")
            writer.write(serving.take(data))

    def _make_room(self) -> None:
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._refusals.note(_name(self._purposes), Reason.CROWD, peer_of(oldest), "too many others had not proven themselves either")
            oldest.transport.abort()

    def _turn_away(self, serving: Serving, writer: asyncio.StreamWriter, reason: str, detail: str) -> None:
        if writer in self._waiting:  # else it was counted when it was pushed out
            self._refusals.note(serving.purpose or _name(self._purposes), reason, peer_of(writer), detail)
        writer.transport.abort()


def _name(purposes: Collection[Purpose]) -> str:
    """Of a listener, where it is not known what a connection was for."""
    return next(iter(purposes))


async def knock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, purpose: Purpose, limit_s: float = UNPROVEN_S) -> None:
    """The client's half: prove the secret, and have it proven. Raises OSError: LineRefused, or TimeoutError after ``limit_s``."""
    asking = Asking(secret.held(), purpose, secret.nonce())
    writer.write(asking.hello)
    async with asyncio.timeout(limit_s):
        while asking.missing:
            data = await reader.read(asking.missing)
            if not data:
                raise LineRefused(Reason.HUNG_UP, "the other end hung up: it speaks another version, or refuses what this is for")
            try:
                writer.write(asking.take(data))
            except LineRefused:
                writer.write(DENIAL)
                raise


def same_user(writer: asyncio.StreamWriter, listener: str, refusals: Refusals = REFUSALS) -> bool:
    """Whether the other end of a Unix socket belongs to this process's user; else it is closed, and counted."""
    pid, uid = user_of(writer.get_extra_info("socket"))
    if uid == os.geteuid():
        return True
    refusals.note(listener, Reason.USER, f"process {pid}", f"it belongs to user {uid}")
    writer.transport.abort()
    return False
