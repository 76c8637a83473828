"""What the memory tier promises beyond the suite for all stores: bounded, fenced, whole or not at all, and one of two copies is enough."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch

from benchmarks.store_peers import in_blocks
from fleet.host.lines import Knock
from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.levels import peers_url
from fleet.protocol.proof import Purpose
from fleet.protocol.types import Copy, StateId
from storage.backends.files import StoreError
from storage.checkpoint.manifest import CheckpointDamaged, checkpoint_id
from storage.checkpoint.store import CheckpointStore, write_part
from storage.peers.files import PeerFiles
from storage.peers.memory import PeerMemory, Refused, send
from tests.support.waiting import until


@pytest.fixture
def memories() -> Iterator[list[PeerMemory]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(PeerMemory("127.0.0.1"))) for _ in range(2)]


def put_parts(memories: list[PeerMemory], state: StateId, generation: int = 1, size: int = 100) -> CommitCheckpoint:
    """Each of two parts goes to the other memory."""
    name = checkpoint_id(state, generation)
    parts = [write_part(peers_url([m.address]), name, i, 2, [(i, torch.full((size,), state.step))]) for i, m in enumerate(memories)]
    return CommitCheckpoint(name, state, tuple(parts), "", 0.0, 0.0)


def files_of(memories: list[PeerMemory]) -> PeerFiles:
    return PeerFiles(peers_url([memory.address for memory in memories]))


def store_of(memories: list[PeerMemory]) -> CheckpointStore:
    return CheckpointStore(peers_url([memory.address for memory in memories]))


def test_a_node_says_what_it_holds_and_of_how_many(memories: list[PeerMemory]) -> None:
    order = put_parts(memories, StateId(0, 7))
    assert memories[1].held() == (Copy(order.checkpoint, StateId(0, 7), (1,), 0),), "not committed yet"
    store_of(memories).commit(order)
    assert [memory.held()[0].count for memory in memories] == [2, 2], "any one of them knows how many parts there must be"


def test_at_most_two_steps_are_kept_and_the_committed_one_is_among_them(memories: list[PeerMemory]) -> None:
    store = store_of(memories)
    store.commit(put_parts(memories, StateId(0, 1)))
    for step in (2, 3, 4):
        put_parts(memories, StateId(0, step))  # none of them is ever committed
        assert [StateId(0, 1), StateId(0, step)] == [copy.state for copy in memories[0].held()]
    store.commit(put_parts(memories, StateId(0, 5)))
    put_parts(memories, StateId(0, 6))
    assert [copy.state.step for copy in memories[0].held()] == [5, 6]
    assert store.load(checkpoint_id(StateId(0, 5), 1))[1][0].tolist() == [5] * 100


@pytest.mark.parametrize("late", [(StateId(0, 9), 5), (StateId(1, 9), 3)], ids=["older history", "older generation"])
def test_an_overtaken_writer_is_refused_and_pushes_nothing_out(memories: list[PeerMemory], late: tuple[StateId, int]) -> None:
    store_of(memories).commit(put_parts(memories, StateId(1, 4), generation=4))
    before = memories[0].held()
    with pytest.raises(Refused, match="stale"):
        put_parts(memories, *late)
    assert memories[0].held() == before


def test_what_is_beyond_the_capacity_is_refused_and_counted_no_longer() -> None:
    with contextlib.closing(PeerMemory("127.0.0.1", capacity_bytes=50_000)) as memory:
        with pytest.raises(Refused, match="full"):
            put_parts([memory, memory], StateId(0, 1), size=20_000)
        assert memory._held() < 50_000
        with pytest.raises(Refused, match="full"):
            write_part(peers_url([memory.address]), "c", 0, 1, [(0, torch.zeros(20_000))])


def test_a_writer_that_dies_leaves_nothing(memories: list[PeerMemory]) -> None:
    host, port = memories[0].address.split(":")
    with socket.create_connection((host, int(port))) as stream:
        stream.sendall(Knock(stream, Purpose.MEMORY).proof())
        send(stream, {"op": "write", "name": f"{checkpoint_id(StateId(0, 1), 1)}/__0_0.distcp"})
        send(stream, {"op": "block", "number": 0, "bytes": 1000, "digest": "00"}, [memoryview(bytes(10))])
        until(lambda: memories[0]._held() == 1000, "the block has begun")
    until(lambda: memories[0]._held() == 0, "what was sent is gone")
    assert memories[0].held() == ()


def write(memories: list[PeerMemory], state: StateId, data: bytes) -> str:
    """A file of blocks into all of them; returns its name."""
    name = f"{checkpoint_id(state, 1)}/2"
    with files_of(memories).writing(name) as sink:
        for number, block in enumerate(in_blocks([memoryview(data)])):
            sink.block(number, block)
    return name


def read(memories: list[PeerMemory], name: str) -> bytes:
    return b"".join(files_of(memories).fetch(name))


def test_a_byte_that_flips_in_a_memory_is_found_and_the_other_copy_is_used(memories: list[PeerMemory]) -> None:
    sent = torch.randn(5_000_000).numpy().tobytes()
    name = write(memories, StateId(0, 3), sent)
    memories[0]._files[f"{name}"].blocks[1][77] ^= 1
    with pytest.raises(Refused, match="damaged: block 1"):
        read(memories[:1], name)
    assert read(memories, name) == sent


def test_a_flipped_byte_of_a_checkpoint_is_named(memories: list[PeerMemory]) -> None:
    order = put_parts(memories, StateId(0, 7))
    store_of(memories).commit(order)
    memories[1]._files[f"{order.checkpoint}/__1_0.distcp"].blocks[0][500] ^= 1
    with pytest.raises(CheckpointDamaged, match="__1_0.distcp does not match"):
        store_of(memories).load(order.checkpoint)


def test_of_what_was_never_committed_the_last_two_steps_are_kept(memories: list[PeerMemory]) -> None:
    names = [write(memories, StateId(0, step), bytes([step])) for step in range(4)]
    assert read(memories, names[2]) == b"\x02"
    with pytest.raises(FileNotFoundError):
        read(memories, names[1])


def test_a_memory_that_is_gone_fails_the_write_and_is_passed_over_by_the_read(memories: list[PeerMemory]) -> None:
    name = write(memories, StateId(0, 1), b"abc")
    memories[0].close()
    with pytest.raises(StoreError, match="unreachable"):
        write(memories, StateId(0, 2), b"abc")
    assert read(memories, name) == b"abc"
