"""Loans of parameters between ranks, over real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from actors.rank.fsdp.lending import WIRE, YES, Address, Borrower, Lender, Lent, Request, Wish
from actors.rank.telemetry.usage import SENT
from fleet.protocol.types import StateId

HERE = StateId(0, 7)
VALUES = torch.arange(1 << 20, dtype=torch.float32)


def find(state: StateId, flat: int, lo: int, hi: int) -> Lent | None:
    return Lent(VALUES[lo:hi], lambda: True) if (state, flat) == (HERE, 3) else None


class Takes:
    """Knows of no gift."""

    def room(self, request: Request) -> torch.Tensor:
        raise ConnectionError("of nothing that is here")

    def take(self, request: Request, elements: torch.Tensor) -> bool:
        return False


@pytest.fixture
def lender() -> Iterator[Lender]:
    made = Lender("127.0.0.1", find, Takes())
    yield made
    made.close()


@pytest.fixture
def borrower() -> Iterator[Borrower]:
    made = Borrower(lambda: False, 20.0)
    yield made
    made.close()


def wish(lo: int, hi: int, flat: int = 3) -> Wish:
    return Wish(flat, lo, hi, torch.zeros(hi - lo))


def test_what_is_lent_is_what_was_asked_for(lender: Lender, borrower: Borrower) -> None:
    asked = [wish(0, 1 << 20), wish(5, 6), wish(1024, 4096)]
    assert borrower.fetch(HERE, [(lender.address, one) for one in asked]) == []
    for one in asked:
        assert torch.equal(one.into, VALUES[one.lo : one.hi])


def test_it_is_cast_before_it_travels(lender: Lender, borrower: Borrower) -> None:
    before = SENT.total
    half = Wish(3, 100, 2100, torch.zeros(2000, dtype=torch.bfloat16))
    assert borrower.fetch(HERE, [(lender.address, half)]) == []
    assert torch.equal(half.into, VALUES[100:2100].to(torch.bfloat16))
    assert SENT.total - before == 4000


def test_what_is_not_here_is_refused_and_the_next_request_is_answered(lender: Lender, borrower: Borrower) -> None:
    wrong, right = wish(0, 10, flat=4), wish(0, 10)
    assert borrower.fetch(HERE, [(lender.address, wrong), (lender.address, right)]) == [0]
    assert torch.equal(right.into, VALUES[:10])
    assert borrower.fetch(StateId(0, 8), [(lender.address, right)]) == [0]


def test_a_lender_that_is_gone_is_told_at_once(lender: Lender, borrower: Borrower) -> None:
    assert borrower.fetch(HERE, [(lender.address, wish(0, 10))]) == []
    lender.close()
    assert borrower.fetch(HERE, [(lender.address, wish(0, 10)), (lender.address, wish(3, 4))]) == [0, 1]


def test_whoever_does_not_know_the_token_is_told_nothing(lender: Lender) -> None:
    with socket.create_connection(lender.address[:2], 10.0) as connection:
        connection.sendall(Request(HERE, 3, 0, 10).packed(b"x" * 16))
        assert connection.recv(1) == b""


def test_a_wait_ends_when_the_rank_is_called_away() -> None:
    """A lender that is stopped answers nothing, and holds nobody up; what it says later belongs to no other request."""
    asked, go_on = threading.Event(), threading.Event()

    def slow(state: StateId, flat: int, lo: int, hi: int) -> Lent | None:
        asked.set()
        go_on.wait(20)
        return Lent(VALUES[lo:hi], lambda: True)

    lender, borrower = Lender("127.0.0.1", slow, Takes()), Borrower(asked.is_set, 20.0)
    first, second = wish(0, 10), wish(10, 20)
    assert borrower.fetch(HERE, [(lender.address, first)]) == [0]
    go_on.set()
    patient = Borrower(lambda: False, 20.0)
    assert patient.fetch(HERE, [(lender.address, second)]) == []
    assert torch.equal(second.into, VALUES[10:20])
    for each in (lender, borrower, patient):
        each.close()


def test_what_has_changed_on_its_way_does_not_count(borrower: Borrower) -> None:
    said = iter([False, True])
    lender = Lender("127.0.0.1", lambda state, flat, lo, hi: Lent(VALUES[lo:hi], lambda: next(said)), Takes())
    assert borrower.fetch(HERE, [(lender.address, wish(0, 10)), (lender.address, wish(5, 9))]) == [0]
    lender.close()


def test_half_an_answer_is_no_answer(borrower: Borrower) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(WIRE.size)
                connection.sendall(YES + bytes(20))

        threading.Thread(target=serve, daemon=True).start()
        address = Address("127.0.0.1", listener.getsockname()[1], bytes(16))
        assert borrower.fetch(HERE, [(address, wish(0, 10))]) == [0]


def test_addresses_travel_as_bytes(lender: Lender) -> None:
    assert Address.unpacked(lender.address.packed().ljust(96, b"\0")) == lender.address


def test_a_lender_that_is_closed_leaves_no_thread() -> None:
    before = threading.active_count()
    lender, borrower = Lender("127.0.0.1", find, Takes()), Borrower(lambda: False, 20.0)
    assert borrower.fetch(HERE, [(lender.address, wish(0, 10))]) == []
    borrower.close()
    lender.close()
    end_s = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < end_s, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)
