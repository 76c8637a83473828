"""Connections that a server of ``asyncio`` has accepted. The server itself does not keep them, and does not close them when it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

WRITTEN_S = 1.0
"""At the end, slow readers have so long to receive the last bytes."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Connections:
    """The open connections. Each is closed once it has been served, and :meth:`close` ends all with the server."""

    def __init__(self) -> None:
        self._served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def serving(self, serve: Serve) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """A callback for the server, which runs ``serve`` for each connection."""

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(_to_its_end(serve, reader, writer))
            self._served[task] = writer
            task.add_done_callback(self._served.pop)

        return begin

    async def close(self) -> None:
        """Cancel all ``serve``, wait for their end, and for a while for their last bytes."""
        tasks, writers = list(self._served), list(self._served.values())
        if not tasks:
            return
        await asyncio.sleep(0)  # a task that is cancelled before its first line would not close its connection
        for task, writer in zip(tasks, writers, strict=True):
            if not writer.is_closing():
                task.cancel()
        _, late = await asyncio.wait(tasks, timeout=WRITTEN_S)
        for task in late:
            task.cancel()
            writers[tasks.index(task)].transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets the transports report their end


async def _to_its_end(serve: Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await serve(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
