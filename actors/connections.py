"""Connections that a server of ``asyncio`` has accepted. The server forgets them, and leaves them as they are when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Connections:
    """Who is being served, so that all of it can be ended with the server."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def serving(self, serve: Serve) -> Serve:
        """``serve``, for the server to call."""

        async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await serve(reader, writer)

        return served

    async def close(self) -> None:
        """Cancel all ``serve``, which close their connections, and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
