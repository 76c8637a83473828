"""Frames on a stream: four bytes of length, then a JSON message. One format for ranks, agents and the coordinator."""

from __future__ import annotations

import asyncio
import socket
import struct

from fleet.errors import ProtocolError

LENGTH = struct.Struct("<I")
LARGEST_BYTES = 256 << 20


def frame(data: bytes) -> bytes:
    """``data`` as it goes on the stream."""
    return LENGTH.pack(len(data)) + data


def _checked(length: int) -> int:
    if length > LARGEST_BYTES:
        raise ProtocolError(f"a frame of {length} bytes: the peer does not speak this protocol")
    return length


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Next frame. Raises asyncio.IncompleteReadError at end of file."""
    head = await reader.readexactly(LENGTH.size)
    return await reader.readexactly(_checked(LENGTH.unpack(head)[0]))


class FrameBuffer:
    """Reassembles frames from a socket that is read without blocking."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        frames = []
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + _checked(LENGTH.unpack_from(self._data)[0])
            if len(self._data) < end:
                break
            frames.append(bytes(self._data[LENGTH.size : end]))
            del self._data[:end]
        return frames


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """A connected stream socket that children do not inherit across exec."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(timeout_s)
    try:
        stream.connect(path)
    except OSError:
        stream.close()
        raise
    return stream
