"""Gradients on their way to the owners of their chunks, over real connections."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from actors.rank.fsdp.exchange import UNDER_WAY_BYTES, Means, Sender, Sums
from actors.rank.fsdp.serving import Address, PeerRequest, PeerServer
from actors.rank.step.reduction import Reducer
from fleet.protocol.chunks import Readiness, Turn, can_accept
from fleet.protocol.types import StateId

AT, TURN = StateId(0, 7), Turn(3, 1)
STRETCH = (2, 0, 4096)


class Kept:
    """Takes what comes, once :attr:`opened`."""

    def __init__(self, useful: bool = True) -> None:
        self.known, self.useful, self.opened = True, useful, threading.Event()
        self.came = list[tuple[PeerRequest, torch.Tensor]]()
        self.opened.set()

    def room(self, request: PeerRequest) -> torch.Tensor:
        if not self.known:
            raise ConnectionError("of nothing that is here")
        return torch.empty(request.hi - request.lo)

    def take(self, request: PeerRequest, elements: torch.Tensor) -> bool:
        self.opened.wait(20)
        self.came.append((request, elements))
        return self.useful


def request(shard: int = 4, lo: int = 0, hi: int = 4096) -> PeerRequest:
    return PeerRequest(AT, 2, lo, hi, contribution=True, turn=TURN, shard=shard)


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def address(kept: Kept) -> Iterator[Address]:
    server = PeerServer("127.0.0.1", lambda *asked: None, kept)
    yield server.address
    kept.opened.set()
    server.close()


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(lambda: False, 20.0)
    yield made
    made.close()


def test_what_is_sent_arrives_in_order_and_a_flush_waits_for_it(kept: Kept, address: Address, sender: Sender) -> None:
    sent = [(request(shard), torch.randn(4096)) for shard in range(8)]
    for one, elements in sent:
        sender.send(address, one, elements)
    assert sender.flush() == ""
    assert [one for one, _ in kept.came] == [one for one, _ in sent]
    assert all(torch.equal(found, elements) for (_, found), (_, elements) in zip(kept.came, sent, strict=True))


def test_what_is_of_no_use_fails_all(kept: Kept, address: Address, sender: Sender) -> None:
    kept.useful = False
    sender.send(address, request(), torch.zeros(4096))
    assert "at another step" in sender.flush()
    assert sender.failed


def test_a_new_view_forgets_what_has_failed(kept: Kept, address: Address, sender: Sender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        gone = Address("127.0.0.1", nobody.getsockname()[1], b"x" * 16)
    sender.send(gone, request(), torch.zeros(4096))
    assert "flat buffer 2" in sender.flush()
    sender.begin()
    sender.send(address, request(), torch.ones(4096))
    assert sender.flush() == "" and len(kept.came) == 1


def test_a_rank_that_is_called_away_does_not_wait_for_a_silent_one(kept: Kept, address: Address) -> None:
    kept.opened.clear()
    sender = Sender(lambda: True, 20.0)
    sender.send(address, request(), torch.zeros(4096))
    assert "called away" in sender.flush()
    sender.close()


def test_a_backward_waits_when_too_much_is_under_way(kept: Kept, address: Address, sender: Sender) -> None:
    kept.opened.clear()
    sender.send(address, request(0, hi=UNDER_WAY_BYTES // 4), torch.zeros(UNDER_WAY_BYTES // 4))
    more = threading.Thread(target=sender.send, args=(address, request(1), torch.zeros(4096)))
    more.start()
    more.join(0.3)
    assert more.is_alive()
    kept.opened.set()
    more.join(20)
    assert sender.flush() == "" and len(kept.came) == 2


def test_a_gift_of_what_is_not_known_here_ends_the_connection(kept: Kept, address: Address, sender: Sender) -> None:
    """Its bytes would be taken for a request."""
    kept.known = False
    sender.send(address, request(hi=1 << 20), torch.zeros(1 << 20))
    assert sender.flush() != "" and not kept.came


@pytest.mark.parametrize("seed", range(20))
def test_shards_are_added_in_the_order_of_the_tree_however_they_come(seed: int) -> None:
    """And the second time that one comes does not count."""
    draw, shards = random.Random(seed), random.Random(seed).choice([1, 2, 3, 5, 8, 13])
    torch.manual_seed(seed)
    gradients = [torch.randn(4096) for _ in range(shards)]
    reducer = Reducer(shards)
    found = []
    for _ in range(3):
        sums = Sums(shards, reducer.mean)
        sums.begin([STRETCH], [(5, 0, 10)])
        order = [*range(shards), *draw.sample(range(shards), shards // 2)]
        draw.shuffle(order)
        ends = [mean for shard in order if (mean := sums.add(STRETCH, shard, gradients[shard].clone())) is not None]
        assert len(ends) == 1 and sums.missing == [(5, 0, 10)]
        sums.know((5, 0, 10), torch.ones(10))
        found.append(sums.means()[STRETCH])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], torch.stack(gradients).mean(0), rtol=1e-4, atol=1e-6)


def test_means_stand_in_the_place_of_a_flat_buffer() -> None:
    parts = {(1024, 2048): torch.arange(1024.0, 2048.0), (4096, 4100): torch.arange(4096.0, 4100.0)}
    means = Means(4100, parts, torch.empty(0))
    assert means.numel() == 4100 and means.is_floating_point() and means[4100:].numel() == 0
    assert means[1030:1032].tolist() == [1030.0, 1031.0] and means[4099:].tolist() == [4099.0]
    with pytest.raises(KeyError, match="2000 to 2049"):
        means[2000:2049]


@pytest.mark.parametrize(
    ("state", "turn", "still", "fate"),
    [
        (AT, TURN, True, Readiness.NOW),
        (AT, TURN, False, Readiness.LATER),
        (StateId(0, 8), TURN, True, Readiness.LATER),  # it has taken the step already, and this rank will
        (StateId(0, 6), TURN, True, Readiness.NEVER),
        (AT, Turn(3, 2), True, Readiness.LATER),
        (AT, Turn(3, 0), True, Readiness.NEVER),
        (AT, Turn(4, 0), True, Readiness.LATER),
        (AT, Turn(2, 9), True, Readiness.NEVER),
    ],
)
def test_what_becomes_of_a_gift(state: StateId, turn: Turn, still: bool, fate: Readiness) -> None:
    assert can_accept((AT, TURN), (state, turn), still=still) is fate
