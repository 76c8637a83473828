"""An agent's line to a coordinator, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.connections import Connections
from actors.lines import Reception, knock
from actors.messages import DOWN, UP, AgentHello, AgentWelcome, SpanBatch
from fleet.host.wire import frame, read_frame
from fleet.protocol.events import NodeLeaves
from fleet.protocol.proof import Purpose
from fleet.protocol.records import Spans
from fleet.protocol.types import Member
from tests.support.agents import agent_of

LIMIT_S = 30.0


def spans(start_us: int) -> Spans:
    return Spans(Member(0, 0), 0, 0, 0, start_us, (10,), "i")


def test_nothing_overtakes_what_the_last_coordinator_did_not_acknowledge(tmp_path: Path) -> None:
    """The new one takes its time to answer, and meanwhile the agent has more to tell."""
    assert asyncio.run(asyncio.wait_for(_numbers_received(tmp_path), LIMIT_S)) == [1, 2]


async def _numbers_received(folder: Path) -> list[int]:
    greeted, reported, received = asyncio.Event(), asyncio.Event(), asyncio.Queue[int]()

    connections = Connections()

    async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = UP.decode(await read_frame(reader))
        assert isinstance(hello, AgentHello)
        greeted.set()
        await reported.wait()
        writer.write(frame(DOWN.encode(AgentWelcome(hello.boot, hello.sent_us, 0, 0))))
        while True:
            message = UP.decode(await read_frame(reader))
            if isinstance(message, SpanBatch):
                received.put_nowait(message.number)

    begin = connections.serving(coordinate)
    server = Reception("127.0.0.1", 0, (Purpose.AGENT,), lambda reader, writer, _: begin(reader, writer))
    agent = agent_of("node0", 0, folder, f"127.0.0.1:{server.port}")
    agent._batch([spans(0)])  # as it is left when a line breaks
    await agent.start()
    try:
        await greeted.wait()
        agent._up.send(*agent._batch([spans(10)]))  # as each report does
        reported.set()
        return [await received.get(), await received.get()]
    finally:
        await agent.stop()
        await server.close()
        await connections.close()


def test_an_agent_that_is_told_to_end_says_so_to_each_coordinator_with_the_same_time(tmp_path: Path) -> None:
    first, again = asyncio.run(asyncio.wait_for(_notices_received(tmp_path), LIMIT_S))
    assert first == again, "the first SIGTERM counts, and a coordinator that is new hears of it"
    assert first.node == "node0" and "SIGTERM" in first.why


async def _notices_received(folder: Path) -> tuple[NodeLeaves, NodeLeaves]:
    received, connections = asyncio.Queue[NodeLeaves](), Connections()

    async def coordinate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = UP.decode(await read_frame(reader))
        assert isinstance(hello, AgentHello)
        writer.write(frame(DOWN.encode(AgentWelcome(hello.boot, hello.sent_us, 0, 0))))
        while True:
            message = UP.decode(await read_frame(reader))
            if isinstance(message, NodeLeaves):
                received.put_nowait(message)
                writer.close()
                return

    begin = connections.serving(coordinate)
    server = Reception("127.0.0.1", 0, (Purpose.AGENT,), lambda reader, writer, _: begin(reader, writer))
    agent = agent_of("node0", 0, folder, f"127.0.0.1:{server.port}")
    await agent.start()
    try:
        agent.leave_in(30.0)
        agent.leave_in(5.0)
        return await received.get(), await received.get()
    finally:
        await agent.stop()
        await server.close()
        await connections.close()


@pytest.mark.parametrize("turns", range(6))
def test_a_listener_takes_the_port_of_the_last_one_whose_lines_end_with_it(turns: int) -> None:
    """One line is in use, one has proven nothing, and one is just let in: so many turns of the loop ago."""
    assert asyncio.run(asyncio.wait_for(_read_after_the_end(turns), LIMIT_S)) == [b"", b"", b""]


async def _read_after_the_end(turns: int) -> list[bytes]:
    served, connections = asyncio.Queue[bytes](), Connections()

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        served.put_nowait(await reader.readexactly(5))
        await reader.read()

    begin = connections.serving(serve)
    first = Reception("127.0.0.1", 0, (Purpose.AGENT,), lambda reader, writer, _: begin(reader, writer))
    lines = [await asyncio.open_connection("127.0.0.1", first.port) for _ in range(3)]
    for reader, writer in (lines[0], lines[2]):
        await knock(reader, writer, Purpose.AGENT)
        if writer is lines[0][1]:
            writer.write(b"hello")
            assert await served.get() == b"hello"
    for _ in range(turns):
        await asyncio.sleep(0)
    await first.close()
    await connections.close()
    second = Reception("127.0.0.1", first.port, (Purpose.AGENT,), lambda reader, writer, _: begin(reader, writer))
    again = await asyncio.open_connection("127.0.0.1", second.port)
    await knock(*again, Purpose.AGENT)
    again[1].write(b"again")
    assert await served.get() == b"again"
    await second.close()
    await connections.close()
    received = [await _rest(reader) for reader, _ in lines]
    for _, writer in (*lines, again):
        writer.close()
    return received


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:  # its proof was never read
        return b""
