"""One lost rank's part of the state, from the memory of another node's agent, against a plain copy of the same bytes over loopback TCP.

Both ends of both are processes of their own. A restore ends with the bytes in fresh memory. Fleet's includes the search for the holder of
the part, and the comparison of every block with its digest.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np

from fleet.host import secret
from fleet.protocol.levels import peers_url
from fleet.protocol.types import StateId
from storage.backends.blocks import BLOCK_BYTES
from storage.checkpoint.manifest import checkpoint_id

HOST = "127.0.0.1"
PART = f"{checkpoint_id(StateId(0, 1), 1)}/0"


def _serve_memory(pipe: Connection) -> None:
    from storage.peers.memory import PeerMemory

    memory = PeerMemory(HOST)
    pipe.send(memory.address)
    pipe.recv()
    memory.close()


def _serve_plainly(pipe: Connection, size: int) -> None:
    """Send ``size`` bytes over each new connection."""
    data = memoryview(np.frombuffer(os.urandom(size), dtype=np.uint8)).cast("B")
    with socket.create_server((HOST, 0)) as server:
        pipe.send(f"{HOST}:{server.getsockname()[1]}")
        while not pipe.poll():
            server.settimeout(0.1)
            try:
                stream, _ = server.accept()
            except TimeoutError:
                continue
            with stream:
                stream.settimeout(None)
                stream.sendall(data)


def _plain_copy_s(address: str, size: int) -> float:
    host, port = address.split(":")
    begun_s = time.perf_counter()
    buffer = memoryview(np.empty(size, dtype=np.uint8)).cast("B")
    with socket.create_connection((host, int(port))) as stream:
        at = 0
        while at < size:
            at += stream.recv_into(buffer[at:], size - at, socket.MSG_WAITALL)
    return time.perf_counter() - begun_s


def in_blocks(segments: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The segments, one after the other, cut into blocks of BLOCK_BYTES; the last one may be shorter."""
    block: list[memoryview] = []
    filled = 0
    for segment in segments:
        view = segment.cast("B")
        while len(view):
            piece, view = view[: BLOCK_BYTES - filled], view[BLOCK_BYTES - filled :]
            block.append(piece)
            filled += len(piece)
            if filled == BLOCK_BYTES:
                yield block
                block, filled = [], 0
    if block:
        yield block


def _put(address: str, part: memoryview) -> None:
    from storage.peers.files import PeerFiles

    with PeerFiles(peers_url([address])).writing(PART) as sink:
        for number, block in enumerate(in_blocks([part])):
            sink.block(number, block)


def _restore_s(address: str, size: int) -> float:
    from storage.peers.files import PeerFiles

    begun_s = time.perf_counter()
    blocks = PeerFiles(peers_url([address])).fetch(PART)
    taken_s = time.perf_counter() - begun_s
    if sum(map(len, blocks)) != size:
        raise RuntimeError("the part came back short")
    return taken_s


def collect(size: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every restore and every plain copy, in turn, the first of each left out."""
    context = multiprocessing.get_context("spawn")
    (memory, theirs), (plain, other) = context.Pipe(), context.Pipe()
    servers = [
        context.Process(target=secret.holding, args=(secret.held(), _serve_memory, theirs)),
        context.Process(target=_serve_plainly, args=(other, size)),
    ]
    for server in servers:
        server.start()
    samples: dict[str, list[float]] = {"fleet_peer_restore_s": [], "tcp_copy_s": []}
    try:
        address, raw = memory.recv(), plain.recv()
        part = memoryview(np.random.default_rng(0).bytes(size)).cast("B")
        _put(address, part)
        for repetition in range(-1, repetitions):
            restored_s, copied_s = _restore_s(address, size), _plain_copy_s(raw, size)
            if repetition >= 0:
                samples["fleet_peer_restore_s"].append(restored_s)
                samples["tcp_copy_s"].append(copied_s)
    finally:
        for pipe, server in zip((memory, plain), servers, strict=True):
            pipe.send(None)
            server.join(20)
            server.kill()
    return samples
