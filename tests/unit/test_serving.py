"""Loans of parameters between ranks, over real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from actors.rank.fsdp.serving import WIRE, YES, Address, FetchRequest, PeerFetcher, PeerRequest, PeerServer, Served, reached
from actors.rank.telemetry.usage import SENT
from fleet.host.lines import Doorkeeper
from fleet.protocol.proof import Purpose
from fleet.protocol.types import StateId

HERE = StateId(0, 7)
VALUES = torch.arange(1 << 20, dtype=torch.float32)


def find(state: StateId, flat: int, lo: int, hi: int) -> Served | None:
    return Served(VALUES[lo:hi], lambda: True) if (state, flat) == (HERE, 3) else None


class Takes:
    """Knows of no contribution."""

    def room(self, request: PeerRequest) -> torch.Tensor:
        raise ConnectionError("of nothing that is here")

    def take(self, request: PeerRequest, elements: torch.Tensor) -> bool:
        return False


@pytest.fixture
def server() -> Iterator[PeerServer]:
    made = PeerServer("127.0.0.1", find, Takes())
    yield made
    made.close()


@pytest.fixture
def fetcher() -> Iterator[PeerFetcher]:
    made = PeerFetcher(lambda: False, 20.0)
    yield made
    made.close()


def wanted(lo: int, hi: int, flat: int = 3) -> FetchRequest:
    return FetchRequest(flat, lo, hi, torch.zeros(hi - lo))


def test_what_is_lent_is_what_was_asked_for(server: PeerServer, fetcher: PeerFetcher) -> None:
    asked = [wanted(0, 1 << 20), wanted(5, 6), wanted(1024, 4096)]
    assert fetcher.fetch(HERE, [(server.address, one) for one in asked]) == []
    for one in asked:
        assert torch.equal(one.into, VALUES[one.lo : one.hi])


def test_it_is_cast_before_it_travels(server: PeerServer, fetcher: PeerFetcher) -> None:
    before = SENT.total
    half = FetchRequest(3, 100, 2100, torch.zeros(2000, dtype=torch.bfloat16))
    assert fetcher.fetch(HERE, [(server.address, half)]) == []
    assert torch.equal(half.into, VALUES[100:2100].to(torch.bfloat16))
    assert SENT.total - before == 4000


def test_what_is_not_here_is_refused_and_the_next_request_is_answered(server: PeerServer, fetcher: PeerFetcher) -> None:
    wrong, right = wanted(0, 10, flat=4), wanted(0, 10)
    assert fetcher.fetch(HERE, [(server.address, wrong), (server.address, right)]) == [0]
    assert torch.equal(right.into, VALUES[:10])
    assert fetcher.fetch(StateId(0, 8), [(server.address, right)]) == [0]


def test_a_lender_that_is_gone_is_told_at_once(server: PeerServer, fetcher: PeerFetcher) -> None:
    assert fetcher.fetch(HERE, [(server.address, wanted(0, 10))]) == []
    server.close()
    assert fetcher.fetch(HERE, [(server.address, wanted(0, 10)), (server.address, wanted(3, 4))]) == [0, 1]


def test_whoever_does_not_know_the_token_is_told_nothing(server: PeerServer) -> None:
    with reached(server.address, 10.0, 10.0) as connection:
        connection.sendall(PeerRequest(HERE, 3, 0, 10).packed(b"x" * 16))
        assert connection.recv(1) == b""


def test_whoever_does_not_prove_the_secret_is_told_nothing_either(server: PeerServer) -> None:
    with socket.create_connection(server.address[:2], 10.0) as connection:
        connection.sendall(PeerRequest(HERE, 3, 0, 10).packed(server.address.token))
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_wait_ends_when_the_rank_is_called_away() -> None:
    """A server that is stopped answers nothing, and holds nobody up; what it says later belongs to no other request."""
    asked, go_on = threading.Event(), threading.Event()

    def slow(state: StateId, flat: int, lo: int, hi: int) -> Served | None:
        asked.set()
        go_on.wait(20)
        return Served(VALUES[lo:hi], lambda: True)

    server, fetcher = PeerServer("127.0.0.1", slow, Takes()), PeerFetcher(asked.is_set, 20.0)
    first, second = wanted(0, 10), wanted(10, 20)
    assert fetcher.fetch(HERE, [(server.address, first)]) == [0]
    go_on.set()
    patient = PeerFetcher(lambda: False, 20.0)
    assert patient.fetch(HERE, [(server.address, second)]) == []
    assert torch.equal(second.into, VALUES[10:20])
    for each in (server, fetcher, patient):
        each.close()


def test_what_has_changed_on_its_way_does_not_count(fetcher: PeerFetcher) -> None:
    said = iter([False, True])
    server = PeerServer("127.0.0.1", lambda state, flat, lo, hi: Served(VALUES[lo:hi], lambda: next(said)), Takes())
    assert fetcher.fetch(HERE, [(server.address, wanted(0, 10)), (server.address, wanted(5, 9))]) == [0]
    server.close()


def test_half_an_answer_is_no_answer(fetcher: PeerFetcher) -> None:
    def serve(connection: socket.socket) -> None:
        with connection:
            connection.recv(WIRE.size)
            connection.sendall(YES + bytes(20))

    door = Doorkeeper("127.0.0.1", Purpose.PARAMETERS, serve, "half")
    assert fetcher.fetch(HERE, [(Address("127.0.0.1", door.port, bytes(16)), wanted(0, 10))]) == [0]
    door.close()


def test_addresses_travel_as_bytes(server: PeerServer) -> None:
    assert Address.unpacked(server.address.packed().ljust(96, b"\0")) == server.address


def test_a_lender_that_is_closed_leaves_no_thread() -> None:
    before = threading.active_count()
    server, fetcher = PeerServer("127.0.0.1", find, Takes()), PeerFetcher(lambda: False, 20.0)
    assert fetcher.fetch(HERE, [(server.address, wanted(0, 10))]) == []
    fetcher.close()
    server.close()
    end_s = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < end_s, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)
