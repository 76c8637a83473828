"""Connections that a server of ``asyncio`` has accepted. The server forgets them, and leaves them as they are when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Connections:
    """Who is being served. A connection is closed once it has been served, and all can be ended with the server."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def serving(self, serve: Serve) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """``serve``, for the server to call."""

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(serve(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: writer.close())

        return begin

    async def close(self) -> None:
        """Cancel all ``serve`` and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
