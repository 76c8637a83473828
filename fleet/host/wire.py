"""Frames on a stream: four bytes of length, then a JSON message. One format for ranks, agents and the coordinator."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence

from fleet.errors import LineRefused
from fleet.host.lines import user_of
from fleet.protocol.proof import MIB, Reason

LENGTH = struct.Struct("<I")
LARGEST_BYTES = 64 * MIB
"""Of a frame between processes of one user on one machine. Listeners for other machines have limits of their own."""


def frame(data: bytes) -> bytes:
    """``data`` with its length before it, for the stream."""
    return LENGTH.pack(len(data)) + data


def checked(length: int, largest: int = LARGEST_BYTES) -> int:
    """``length``, when a frame may be so long. Raises LineRefused."""
    if length > largest:
        raise LineRefused(Reason.SIZE, f"a frame of {length} bytes, at most {largest} are taken: the peer does not speak this protocol")
    return length


async def read_frame(reader: asyncio.StreamReader, largest: int = LARGEST_BYTES) -> bytes:
    """Next frame, of at most ``largest`` bytes. Raises asyncio.IncompleteReadError at end of file, LineRefused for a larger one."""
    head = await reader.readexactly(LENGTH.size)
    return await reader.readexactly(checked(LENGTH.unpack(head)[0], largest))


class FrameBuffer:
    """Reassembles frames from a socket that is read without blocking."""

    def __init__(self, largest: int = LARGEST_BYTES) -> None:
        self._data, self._largest = bytearray(), largest

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are whole now. Raises LineRefused for one that is larger than it may be."""
        self._data += data
        frames = []
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + checked(LENGTH.unpack_from(self._data)[0], self._largest)
            if len(self._data) < end:
                break
            frames.append(bytes(self._data[LENGTH.size : end]))
            del self._data[:end]
        return frames


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill ``views``, one after the other. Raises ConnectionResetError when the stream ends before."""
    for view in views:
        while len(view):
            count = connection.recv_into(view, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            view = view[count:]


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """A connected stream socket that children do not inherit across exec. Raises LineRefused where another user listens."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(timeout_s)
    try:
        stream.connect(path)
        _, user = user_of(stream)
        if user != os.geteuid():
            raise LineRefused(Reason.USER, f"{path} is served by user {user}")
    except OSError:
        stream.close()
        raise
    return stream
