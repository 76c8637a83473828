"""A program between a host and its store: it answers in the store's place, or cuts connections in the middle of the data.

``python chaos/store_relay.py HOST PORT deny|tear SEED MARKS`` writes ``ready``, or the reason why it cannot do that. Then it writes the
port on which it listens, and runs until its standard input ends. Its last line is its effect. ``deny``: it answers each request with 403,
as for refused credentials. ``tear``: it passes data on to ``HOST:PORT``, and cuts the connection after a number of bytes, drawn for each
one. A rule of the packet filter brings connections here. The program's own connections to the store carry its mark, ``MARKS`` and its PID,
which the rule leaves alone.

It imports nothing but the standard library, as it has to start at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import sys
from contextlib import suppress

LEAST_BITS, MOST_BITS = 6.0, 22.0
"""A connection is cut after 2 to the power of a number drawn from here, in bytes: from the first line of a request to 4 MiB."""
PIECE = 1 << 16
TLS_HELLO = b"\x16"
BODY = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code><Message>refused by chaos</Message></Error>'
HEAD = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


def body_bytes(head: bytes) -> int:
    """Bytes that a request sends before it expects its answer, from its head."""
    if re.search(rb"(?im)^expect:\s*100-continue", head):
        return 0
    length = re.search(rb"(?im)^content-length:\s*(\d+)", head)
    return int(length[1]) if length else 0


def answer(head: bytes) -> bytes:
    """The answer 403, without a body where none is allowed."""
    body = b"" if head.startswith(b"HEAD ") else BODY
    return HEAD % len(BODY) + body


class StoreRelay:
    """One of the two ways to treat connections; it counts its effects."""

    def __init__(self, host: str, port: int, what: str, seed: int, mark: int) -> None:
        self._far, self._denies, self._mark = (host, port), what == "deny", mark
        self._draw = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.came = self.injected = self.locked = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Treat a new connection."""
        self.came += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # one end has left
                await (self._deny(reader, writer) if self._denies else self._tear(reader, writer))
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def end(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def said(self) -> str:
        """Its effect, in words."""
        did = f"{self.injected} of {self.came} connections {'refused with 403' if self._denies else 'cut off in the middle'}"
        return did + (f"; {self.locked} speak TLS, and were closed" if self.locked else "")

    async def _deny(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(1)
        if first == TLS_HELLO:  # only the store can answer
            self.locked += 1
            return
        head = first + await reader.readuntil(b"\r\n\r\n")
        left = body_bytes(head)
        while left and (data := await reader.read(min(left, PIECE))):
            left -= len(data)
        self.injected += 1
        writer.write(answer(head))
        await writer.drain()
        writer.write_eof()
        await reader.read()  # until the other end has read the answer, and leaves

    async def _tear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        after = int(2 ** self._draw.uniform(LEAST_BITS, MOST_BITS))
        far_reader, far_writer = await asyncio.open_connection(sock=await self._dial())
        back = asyncio.create_task(_pump(far_reader, writer))
        try:
            if await _pump(reader, far_writer, after):
                await far_writer.drain()
                self.injected += 1
            else:
                await back
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            far_writer.transport.abort()

    async def _dial(self) -> socket.socket:
        far = socket.socket()
        with suppress(PermissionError):  # without root, no rule brings connections here
            far.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, self._mark)
        far.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(far, self._far)
        except BaseException:
            far.close()
            raise
        return far


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: float = float("inf")) -> bool:
    """Pass on data to its end, or up to so many bytes. Returns whether the limit was reached."""
    while data := await reader.read(int(min(PIECE, limit))):
        writer.write(data)
        await writer.drain()
        limit -= len(data)
        if not limit:
            return True
    if writer.can_write_eof():
        writer.write_eof()
    return False


async def _serve(relay: StoreRelay) -> None:
    server = await asyncio.start_server(relay.take, "127.0.0.1", 0)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    print("ready", server.sockets[0].getsockname()[1], sep="\n", flush=True)
    await ended.wait()
    server.close()
    await relay.end()


def main(host: str, port: str, what: str, seed: str, marks: str) -> None:
    """Runs until standard input ends."""
    relay = StoreRelay(host, int(port), what, int(seed), int(marks) + os.getpid())
    try:
        asyncio.run(_serve(relay))
    except OSError as error:
        print(error, flush=True)
        raise SystemExit(1) from None
    print(relay.said, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
