"""Connections that a server of ``asyncio`` has accepted. The server forgets them, and leaves them as they are when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

WRITTEN_S = 1.0
"""For what was written last to reach who reads slowly, once all is over."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Connections:
    """Who is being served. A connection is closed once it has been served, and all can be ended with the server."""

    def __init__(self) -> None:
        self._served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def serving(self, serve: Serve) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """``serve``, for the server to call."""

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(_to_its_end(serve, reader, writer))
            self._served[task] = writer
            task.add_done_callback(self._served.pop)

        return begin

    async def close(self) -> None:
        """Cancel all ``serve``, wait for them, and a while for what was written."""
        tasks, writers = list(self._served), list(self._served.values())
        if not tasks:
            return
        await asyncio.sleep(0)  # who is cancelled before its first line would not close its connection
        for task, writer in zip(tasks, writers, strict=True):
            if not writer.is_closing():
                task.cancel()
        _, late = await asyncio.wait(tasks, timeout=WRITTEN_S)
        for task in late:
            task.cancel()
            writers[tasks.index(task)].transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports say now that they are gone


async def _to_its_end(serve: Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await serve(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
