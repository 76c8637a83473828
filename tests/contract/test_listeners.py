"""Each listener of Fleet's own lets in who proves the run's secret, and nobody else; broken and slow peers cost it nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actors.coordinator import Coordinator
from actors.messages import DOWN, UP, AgentHello, AgentWelcome, SettingWanted
from actors.rank.membership.store import _REQUEST, GET, SET, StoreClient, StoreServer
from fleet.errors import LineRefused
from fleet.host import refusals, secret, tls
from fleet.host.clock import MonotonicClock
from fleet.host.journal import JournalWriter, read_journal
from fleet.host.lines import Door, Knock
from fleet.host.refusals import REFUSALS
from fleet.host.wire import LENGTH, FrameBuffer, frame
from fleet.machine.core import FleetMachine
from fleet.protocol.instructions import EndRun
from fleet.protocol.proof import LIMITS_BYTES, MAGIC, Purpose, Reason
from fleet.protocol.records import VERSION, RefusedLines, RunStarted
from fleet.settings.run import RunSettings
from policies import placement
from policies.interval import CheckpointInterval
from policies.recovery import ReformPromoteRegrow
from storage.checkpoint.parts import RetainingStore
from storage.peers.files import Peer
from storage.peers.memory import PeerMemory
from tests.support.certificates import Authority
from tests.support.waiting import until

HOST, BOUND_S = "127.0.0.1", 20.0
BROKEN, SLOW = 10_000, 50
GROWN_BYTES = 48 << 20


class Listener(ABC):
    """One of Fleet's listeners, open, and what a right peer does with it."""

    purpose: Purpose
    address: str

    @abstractmethod
    def served(self) -> bool:
        """Whether a right peer gets what it asks for, on a line of its own."""

    @abstractmethod
    def too_large(self) -> bytes:
        """The head of a frame that is larger than it takes."""

    @abstractmethod
    def nonsense(self) -> bytes:
        """A whole frame that means nothing to it."""

    @abstractmethod
    def close(self) -> None: ...

    def turned_away(self) -> int:
        """How many were refused so far."""
        return sum(refused(self.purpose).values())

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return tls.connect((host, int(port)), BOUND_S)

    def proven(self) -> socket.socket:
        stream = self.connect()
        stream.sendall(Knock(stream, self.purpose).proof())
        return stream


class OfStore(Listener):
    purpose = Purpose.STORE

    def __init__(self, folder: Path) -> None:
        self._server = StoreServer(HOST)
        self.address, self._turn = self._server.address, 0

    def served(self) -> bool:
        self._turn += 1
        with contextlib.closing(StoreClient(self.address, self._turn, BOUND_S)) as client:
            client.set("key", b"value")
            return client.get("key") == b"value"

    def too_large(self) -> bytes:
        return _REQUEST.pack(SET, 4, LIMITS_BYTES[Purpose.STORE] + 1)

    def nonsense(self) -> bytes:
        return _REQUEST.pack(b"?", 1, 1) + b"kv"

    def close(self) -> None:
        self._server.close()


class OfMemory(Listener):
    purpose = Purpose.MEMORY

    def __init__(self, folder: Path) -> None:
        self._memory = PeerMemory(HOST)
        self.address = self._memory.address

    def served(self) -> bool:
        with contextlib.closing(Peer(self.address)) as client:
            return client.ask(op="sizes") == {"sizes": {}}

    def too_large(self) -> bytes:
        return LENGTH.pack(LIMITS_BYTES[Purpose.MEMORY] + 1)

    def nonsense(self) -> bytes:
        return frame(b'{"op": "dance"}')

    def close(self) -> None:
        self._memory.close()


class OfCoordinator(Listener):
    purpose = Purpose.AGENT

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.journal = folder / "journal.jsonl"
        self.address = f"{HOST}:{self._call(self._start(folder))}"

    def _call(self, work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(BOUND_S)  # type: ignore[arg-type]

    async def _start(self, folder: Path) -> int:
        settings, clock = RunSettings(world=1), MonotonicClock()
        machine = FleetMachine(
            settings, ReformPromoteRegrow(settings.budgets, settings.timeouts.start_s), placement, CheckpointInterval(),
            now_s=clock.now_s(),
        )  # fmt: skip
        self._writer = JournalWriter(self.journal)
        self._writer.append(RunStarted(VERSION, "test", clock.now_s(), 0.0, 1, 0, 1, "{}"))
        self._coordinator = Coordinator(machine, clock, self._writer, RetainingStore(f"file://{folder}", 1), self._end, folder)
        return await self._coordinator.start(HOST, 0)

    def _end(self, outcome: EndRun) -> None:
        raise AssertionError(f"the run ended: {outcome}")

    def served(self) -> bool:
        with self.proven() as stream:
            stream.settimeout(BOUND_S)
            stream.sendall(frame(UP.encode(AgentHello("node", 0, "boot", 7))))
            buffer, frames = FrameBuffer(), list[bytes]()
            while not frames:
                frames = buffer.feed(stream.recv(4096))
        welcome = DOWN.decode(frames[0])
        return isinstance(welcome, AgentWelcome) and welcome.sent_us == 7

    def turned_away(self) -> int:
        """Most are in the journal already."""
        return super().turned_away() + sum(record.count for record in read_journal(self.journal) if isinstance(record, RefusedLines))

    def too_large(self) -> bytes:
        return LENGTH.pack(LIMITS_BYTES[Purpose.AGENT] + 1)

    def nonsense(self) -> bytes:
        return frame(UP.encode(SettingWanted("straggler.gain", "0.1")))

    def close(self) -> None:
        self._call(self._coordinator.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BOUND_S)
        self._loop.close()
        self._writer.close()


LISTENERS = {"store": OfStore, "memory": OfMemory, "coordinator": OfCoordinator}


@pytest.fixture(params=LISTENERS)
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    fresh_counts()
    open_ = LISTENERS[request.param](tmp_path)
    try:
        yield open_
    finally:
        open_.close()


def fresh_counts() -> None:
    REFUSALS._counted.clear()


def refused(purpose: str) -> dict[str, int]:
    return {why: one.count for (listener, why), one in REFUSALS._counted.items() if listener == purpose}


def hangs_up(stream: socket.socket) -> bool:
    stream.settimeout(BOUND_S)
    try:
        while stream.recv(1 << 16):
            continue
    except ConnectionError:
        return True
    return True


def test_a_right_peer_is_served(listener: Listener) -> None:
    assert listener.served()
    assert refused(listener.purpose) == {}


def test_another_secret_is_refused_and_counted(listener: Listener) -> None:
    with listener.connect() as stream:
        with pytest.raises(LineRefused, match="secret"):
            Knock(stream, listener.purpose, secret.fresh()).proof()
        assert hangs_up(stream)
    until(lambda: refused(listener.purpose) == {Reason.SECRET: 1}, "the refusal is counted")
    assert listener.served()


def test_a_proof_for_another_listener_is_refused(listener: Listener) -> None:
    wrong = next(each for each in Purpose if each not in (listener.purpose, Purpose.SETTING))
    with listener.connect() as stream:
        knock = Knock(stream, wrong)
        with pytest.raises(OSError, match="hung up|reset"):
            knock.proof()
    until(lambda: refused(listener.purpose) == {Reason.PURPOSE: 1}, "the refusal is counted")


def test_a_frame_that_is_too_large_ends_the_line(listener: Listener) -> None:
    with listener.proven() as stream:
        if listener.purpose == Purpose.AGENT:
            stream.sendall(frame(UP.encode(AgentHello("node", 0, "boot", 7))))
        stream.sendall(listener.too_large())
        assert hangs_up(stream)
    until(lambda: refused(listener.purpose) == {Reason.SIZE: 1}, "the refusal is counted")


def test_a_frame_without_meaning_ends_the_line(listener: Listener) -> None:
    with listener.proven() as stream:
        stream.sendall(listener.nonsense())
        assert hangs_up(stream)
    until(lambda: refused(listener.purpose) == {Reason.FORMAT: 1}, "the refusal is counted")
    assert listener.served()


def broken(rng: random.Random, listener: Listener) -> bytes:
    """What a peer that has no secret may send: any bytes, another protocol, a right start, a large length."""
    head = MAGIC + bytes((1, list(Purpose).index(listener.purpose) + 1))
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(1, 200))
        case 1:
            return b"GET / HTTP/1.1\r\nHost: fleet\r\n\r\n"
        case 2:
            return head + rng.randbytes(32 + rng.randrange(64))
        case 3:
            return head[: rng.randrange(len(head))]
        case 4:
            return LENGTH.pack(rng.randrange(1 << 32)) + rng.randbytes(64)
    return rng.randbytes(4096)


def say_something_broken(listener: Listener, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        with listener.connect() as stream, contextlib.suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, (1).to_bytes(4, "little") + bytes(4))  # leaves no port behind
            stream.sendall(broken(rng, listener))
            if rng.random() < 0.001:  # some wait to be dropped
                hangs_up(stream)


def test_broken_frames_and_slow_peers_cost_nothing(listener: Listener) -> None:
    """Ten thousand of the first while fifty of the second wait: right peers are served, and nothing is left."""
    assert listener.served()
    process = psutil.Process()
    slow = [listener.connect() for _ in range(SLOW)]
    for number, stream in enumerate(slow):
        stream.sendall((MAGIC + bytes((1, 1)))[: number % 10])
    say_something_broken(listener, 0, 200)
    before = process.num_fds(), process.num_threads(), process.memory_info().rss
    workers = [threading.Thread(target=say_something_broken, args=(listener, seed, BROKEN // 2)) for seed in (1, 2)]
    for worker in workers:
        worker.start()
    served = 0
    while any(worker.is_alive() for worker in workers):
        assert listener.served()
        served += 1
    assert served > 10
    for stream in slow:
        assert hangs_up(stream)
        stream.close()
    until(lambda: process.num_fds() <= before[0], "no connection is left", BOUND_S)
    until(lambda: process.num_threads() <= before[1] + 2, "no thread is left", BOUND_S)
    assert process.memory_info().rss < before[2] + GROWN_BYTES
    until(lambda: listener.turned_away() > BROKEN * 0.9, "those who were refused are counted", BOUND_S)
    assert listener.served()


def test_proven_peers_that_say_broken_things_cost_nothing(listener: Listener) -> None:
    rng = random.Random(3)
    for _ in range(300):
        with listener.proven() as stream, contextlib.suppress(OSError):
            stream.sendall(LENGTH.pack(rng.randrange(200)) + rng.randbytes(rng.randrange(200)))
    assert listener.served()


def test_a_store_does_not_wait_for_who_does_not_take_its_answer() -> None:
    """Others are served meanwhile; it is dropped in the end."""
    fresh_counts()
    with contextlib.closing(OfStore(Path())) as store, store.proven() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        key, value = b"9/large", bytes(LIMITS_BYTES[Purpose.STORE])
        deaf.sendall(_REQUEST.pack(SET, len(key), len(value)) + key + value)
        for _ in range(16):
            deaf.sendall(_REQUEST.pack(GET, len(key), 0) + key)
        assert store._server._thread.is_alive()
        for _ in range(20):
            with contextlib.closing(StoreClient(store.address, 9, BOUND_S)) as client:
                client.set("small", b"x")
                assert client.get("small") == b"x"
        until(lambda: refused(Purpose.STORE).get(Reason.SLOW) == 1, "the deaf one is dropped", BOUND_S)


@pytest.mark.parametrize("announced", [-1, 1 << 40, "7", 1.5, None])
def test_a_memory_takes_no_room_for_a_block_of_an_impossible_size(announced: object) -> None:
    import json

    fresh_counts()
    with contextlib.closing(OfMemory(Path())) as memory, memory.proven() as stream:
        stream.sendall(frame(json.dumps({"op": "block", "number": 0, "bytes": announced, "digest": "00"}).encode()))
        assert hangs_up(stream)
        assert memory._memory._held() == 0
    until(lambda: refused(Purpose.MEMORY) == {Reason.SIZE: 1}, "the refusal is counted")


def test_a_crowd_pushes_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_counts()
    with selectors.DefaultSelector() as selector, contextlib.closing(Door(selector, HOST, Purpose.STORE, most=3)) as door:
        host, _, port = door.address.rpartition(":")
        callers = []
        for _ in range(5):
            callers.append(socket.create_connection((host, int(port)), BOUND_S))
            for key, _ in selector.select(BOUND_S):
                door.ready(key.fileobj)
        assert refused(Purpose.STORE) == {Reason.CROWD: 2}
        assert [hangs_up(each) for each in callers[:2]] == [True, True]
        for each in callers:
            each.close()


def test_what_is_refused_is_in_the_journal_by_listener_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actors import coordinator

    fresh_counts()
    monkeypatch.setattr(coordinator, "REPORT_S", 0.05)
    monkeypatch.setattr(refusals, "REPORT_S", 0.0)
    with contextlib.closing(OfCoordinator(tmp_path)) as one:
        with one.connect() as stream:
            stream.sendall(b"GET / HTTP/1.1\r\n")
            assert hangs_up(stream)
        until(lambda: any(isinstance(record, RefusedLines) for record in read_journal(one.journal)), "the journal tells it", BOUND_S)
    [found] = [record for record in read_journal(one.journal) if isinstance(record, RefusedLines)]
    assert (found.where, found.listener, found.reason, found.count) == ("coordinator", "agent", "protocol", 1)
    assert found.peer.startswith(f"{HOST}:")


# ---- between hosts -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    """Whose certificates this process holds: each of its connections is taken for one between hosts."""
    made = Authority()
    tls.hold(made.folder(tmp_path / "tls"), lambda connection: True)
    yield made
    tls.hold("")


def test_between_hosts_a_right_peer_is_served(authority: Authority, listener: Listener) -> None:
    with listener.proven() as stream:
        assert isinstance(stream, tls.TlsSocket)
    for _ in range(3):
        assert listener.served()


def test_between_hosts_who_is_not_of_the_authority_is_refused_and_counted(authority: Authority, listener: Listener, tmp_path: Path) -> None:
    other = tls.identity(Authority().folder(tmp_path / "other"))
    host, _, port = listener.address.rpartition(":")
    with pytest.raises(ssl.SSLCertVerificationError), socket.create_connection((host, int(port)), BOUND_S) as stream:
        other.client.wrap_socket(stream)  # who listens is none of that authority's
    other.client.verify_mode = ssl.CERT_NONE
    stream = other.client.wrap_socket(socket.create_connection((host, int(port)), BOUND_S))
    with stream, pytest.raises(OSError, match="refuses|has closed the connection"):  # the kernel may drop the alert, as bytes are unread
        Knock(stream, listener.purpose).proof()
    with socket.create_connection((host, int(port)), BOUND_S) as stream:
        stream.sendall(MAGIC + bytes(200))
        assert hangs_up(stream)
    until(lambda: refused(listener.purpose) == {Reason.TLS: 3}, "the refusals are counted", BOUND_S)
    assert listener.served()


def test_between_hosts_the_secret_is_asked_for_all_the_same(authority: Authority, listener: Listener) -> None:
    with listener.connect() as stream, pytest.raises(LineRefused, match="secret"):
        Knock(stream, listener.purpose, secret.fresh()).proof()
    until(lambda: refused(listener.purpose) == {Reason.SECRET: 1}, "the refusal is counted")


def test_between_hosts_nothing_of_a_line_is_seen_on_its_way(authority: Authority, listener: Listener) -> None:
    """A relay notes all bytes; where the run does not encrypt, it sees the hello."""
    host, _, port = listener.address.rpartition(":")
    for encrypted in (True, False):
        tls._held.between = lambda connection, encrypted=encrypted: encrypted
        with Overheard((host, int(port))) as overheard, tls.connect(overheard.address, BOUND_S) as stream:
            stream.sendall(Knock(stream, listener.purpose).proof())
            seen = bytes(overheard.bytes)
        assert (MAGIC in seen) is not encrypted and len(seen) > len(MAGIC)


class Overheard:
    """Hands on one connection to ``address``, and keeps all that goes over it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.bytes = bytearray()
        self._thread = threading.Thread(target=self._hand_on, args=(address,))

    def __enter__(self) -> Overheard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(BOUND_S)
        self._listener.close()

    def _hand_on(self, address: tuple[str, int]) -> None:
        with self._listener.accept()[0] as near, socket.create_connection(address, BOUND_S) as far, selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            with contextlib.suppress(OSError):
                while True:
                    for key, _ in ready.select(BOUND_S):
                        assert isinstance(key.fileobj, socket.socket)
                        if not (data := key.fileobj.recv(1 << 16)):
                            return
                        self.bytes += data
                        key.data.sendall(data)
