"""A server that ends takes its connections with it: also one that has said nothing yet, which nobody has in a list of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.connections import Connections

BOUND_S, LARGE = 30.0, bytes(1 << 24)


def test_all_connections_end_with_their_server(tmp_path: Path) -> None:
    ended: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ended.append((await reader.readline()).decode())
            await reader.read()
        finally:
            writer.close()

    async def talk() -> list[bytes]:
        connections = Connections()
        server = await asyncio.start_unix_server(connections.serving(serve), tmp_path / "socket")
        clients = [await asyncio.open_unix_connection(tmp_path / "socket") for _ in range(3)]
        clients[0][1].write(b"hello\n")
        while not ended:
            await asyncio.sleep(0.01)
        server.close()
        await connections.close()
        received = [await asyncio.wait_for(reader.read(), BOUND_S) for reader, _ in clients]
        for _, writer in clients:
            writer.close()
            await writer.wait_closed()
        return received

    assert asyncio.run(talk()) == [b"", b"", b""]
    assert ended == ["hello\n"]


@pytest.mark.parametrize("reads", [True, False])
def test_what_was_written_last_arrives_and_nobody_is_waited_for_in_vain(tmp_path: Path, reads: bool) -> None:
    """The server ends while more is on its way than fits into a socket's buffer."""
    begun = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LARGE)
        begun.set()

    async def talk() -> tuple[int, bool]:
        connections = Connections()
        server = await asyncio.start_unix_server(connections.serving(serve), tmp_path / "socket")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        await begun.wait()
        server.close()
        got = asyncio.create_task(reader.read(-1)) if reads else None
        await connections.close()
        writer.close()
        return len(await got) if got is not None else 0, bool(connections._served)

    assert asyncio.run(asyncio.wait_for(talk(), BOUND_S)) == (len(LARGE) if reads else 0, False)
