"""Gradients leave a rank while its backward goes on: each stretch goes to the owner of its chunk, who adds up all shards'.

:class:`Sender` carries stretches to other ranks, from threads of its own. :class:`Sums` adds up what comes, up the tree of
:mod:`fleet.protocol.shards` in whatever order it comes, so that the bits are those of any other reduction of the same shards.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from actors.rank.fsdp.serving import LOOK_S, REACH_S, YES, Address, PeerRequest, bytes_of
from actors.rank.step.sums import ShardSums
from actors.rank.telemetry.usage import SENT

log = logging.getLogger("fleet.rank")
UNDER_WAY_BYTES = 64 << 20
"""A backward that is faster than its links waits when so much has not arrived yet."""
SUM = -1
"""In the place of a shard: what is brought is the mean over all shards."""
GRACE_S = 0.5
"""A rank that is called away waits so long for what is under way: most calls come between two ranks that are both well."""

Stretch = tuple[int, int, int]
"""(flat buffer, from, to)."""


class _Contribution(NamedTuple):
    request: PeerRequest
    elements: torch.Tensor


class Sender:
    """Carries contributions to other ranks: all peers at once, to each one in order.

    Attributes:
        failed: why a contribution has not arrived, or was of no use to its receiver; empty while all is well.

    Args:
        called_away: whether the view is about to change.
        patience_s: so long a receiver may say nothing.
    """

    def __init__(self, called_away: Callable[[], bool], patience_s: float) -> None:
        self._called_away, self._patience_s = called_away, patience_s
        self._changed = threading.Condition()
        self._peers: dict[Address, _Peer] = {}
        self._under_way = self._bytes = 0
        self.failed = ""

    def send(self, address: Address, request: PeerRequest, elements: torch.Tensor, *, waits: bool = True) -> None:
        """``elements`` are flat, in host memory, and stay as they are until they have arrived.

        Args:
            waits: until there is room; it must not where a receiver's own contributions are taken in.
        """
        if waits:
            self._wait(lambda: self._bytes < UNDER_WAY_BYTES)
        with self._changed:
            if self.failed:
                return
            if address not in self._peers:
                self._peers[address] = _Peer(address, self._patience_s, self._ended)
            self._under_way, self._bytes = self._under_way + 1, self._bytes + elements.nbytes
            self._peers[address].contribute(_Contribution(request, elements))

    def flush(self) -> str:
        """Wait until all has arrived. Returns why not, if not."""
        self._wait(lambda: not self._under_way)
        with self._changed:
            if self._under_way and not self.failed:
                self.failed = "this rank was called away before all its gradients had arrived"
            return self.failed

    def begin(self) -> None:
        """A new view: nothing of the last one is carried any more."""
        with self._changed:
            peers, self._peers = list(self._peers.values()), {}
            self._under_way = self._bytes = 0
            self.failed = ""
        for peer in peers:
            peer.end()

    close = begin

    def _wait(self, enough: Callable[[], bool]) -> None:
        end_s = None
        with self._changed:
            while not enough() and not self.failed:
                self._changed.wait(LOOK_S)
                if end_s is None and self._called_away():
                    end_s = time.monotonic() + GRACE_S
                if end_s is not None and time.monotonic() > end_s:
                    return

    def _ended(self, peer: _Peer, contribution: _Contribution, error: str) -> None:
        with self._changed:
            if self._peers.get(peer.address) is not peer:  # of an earlier view
                return
            self._under_way, self._bytes = self._under_way - 1, self._bytes - contribution.elements.nbytes
            self.failed = self.failed or error
            self._changed.notify_all()


class _Peer:
    """One receiver, with a thread that brings it one contribution after the other."""

    def __init__(self, address: Address, patience_s: float, ended: Callable[[_Peer, _Contribution, str], None]) -> None:
        self.address, self._patience_s, self._ended = address, patience_s, ended
        self._contributions: deque[_Contribution] = deque()
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._over = False
        threading.Thread(target=self._run, name="fleet-brings", daemon=True).start()

    def contribute(self, contribution: _Contribution) -> None:
        with self._changed:
            self._contributions.append(contribution)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._contributions.clear()
            if self._connection is not None:
                _shut(self._connection)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._contributions)
                if self._over:
                    break
                contribution = self._contributions.popleft()
            self._ended(self, contribution, self._carry(contribution))
        if self._connection is not None:
            self._connection.close()

    def _carry(self, contribution: _Contribution) -> str:
        """Empty when it has arrived, and is of use."""
        flat, lo, hi = contribution.request.flat, contribution.request.lo, contribution.request.hi
        what = f"elements {lo} to {hi} of flat buffer {flat} of the gradient, for {self.address.host}:{self.address.port}"
        try:
            connection = self._connection or self._connect()
            connection.sendall(contribution.request.packed(self.address.token))
            connection.sendall(bytes_of(contribution.elements))
            answer = connection.recv(1)
        except OSError as error:
            return f"{what}: {error}"
        SENT.count(contribution.elements.nbytes)
        return "" if answer == YES else f"{what}: {'it is at another step' if answer else 'the connection has ended'}"

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self.address.host, self.address.port), min(REACH_S, self._patience_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._patience_s)
        with self._changed:
            self._connection = connection
            if self._over:
                _shut(connection)
        return connection


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("the peer had ended the connection: %s", error)


class _Flat(NamedTuple):
    flats: Sequence[torch.Tensor]


class Sums:
    """The mean gradient of this rank's chunks: of those that it owns, added up here; of those that it guards, brought by their owners.

    Not for several threads at a time.

    Args:
        shards: of the run.
        mean: turns the sum of all shards into their mean, in place.
    """

    def __init__(self, shards: int, mean: Callable[[torch.Tensor], None]) -> None:
        self._shards, self._mean = shards, mean
        self._sums: dict[Stretch, ShardSums[_Flat]] = {}
        self._found: dict[Stretch, torch.Tensor | None] = {}

    def begin(self, owned: Iterable[Stretch], guarded: Iterable[Stretch]) -> None:
        """Nothing has come yet."""
        self._sums = {stretch: self._empty() for stretch in owned}
        self._found = dict.fromkeys([*self._sums, *guarded])

    def _empty(self) -> ShardSums[_Flat]:
        def make() -> _Flat:
            raise AssertionError("each shard brings its own memory")

        return ShardSums(self._shards, make)

    def add(self, stretch: Stretch, shard: int, elements: torch.Tensor) -> torch.Tensor | None:
        """Of one shard, whose memory is this object's from now on. Returns the mean when it was the last one.

        A shard that has come before is the same again, as it is computed from the same: it does not count twice.
        """
        sums = self._sums[stretch]
        if shard in sums.held:
            return None
        sums.add(shard, _Flat([elements]))
        sums.forget_free()
        if sums.blocks != ((0, self._shards),):
            return None
        total = sums.partials(sums.blocks)[0].flats[0]
        self._mean(total)
        self._found[stretch] = total
        return total

    def know(self, stretch: Stretch, mean: torch.Tensor) -> None:
        """The owner of a chunk that is guarded here has brought its mean."""
        self._found[stretch] = mean

    def owns(self, stretch: Stretch) -> bool:
        return stretch in self._sums

    def keeps(self, stretch: Stretch) -> bool:
        return stretch in self._found

    @property
    def missing(self) -> list[Stretch]:
        """Whose mean is not here yet."""
        return [stretch for stretch, mean in self._found.items() if mean is None]

    def means(self, divisor: float = 1.0) -> Mapping[Stretch, torch.Tensor]:
        """All of them, divided by ``divisor``. Raises KeyError when one is missing."""
        if self.missing:
            raise KeyError(self.missing[0])
        found = {stretch: mean for stretch, mean in self._found.items() if mean is not None}
        return found if divisor in (0.0, 1.0) else {stretch: mean / divisor for stretch, mean in found.items()}


class Means:
    """Stands in the place of a flat buffer of the mean gradient, of which this rank has the stretches of its chunks alone."""

    def __init__(self, length: int, stretches: Mapping[tuple[int, int], torch.Tensor], like: torch.Tensor) -> None:
        self._length, self._stretches, self._none = length, stretches, like[:0]
        self.dtype = like.dtype

    def numel(self) -> int:
        return self._length

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, span: slice) -> torch.Tensor:
        lo, hi, _ = span.indices(self._length)
        if lo >= hi:
            return self._none
        for (start, stop), elements in self._stretches.items():
            if start <= lo and hi <= stop:
                return elements[lo - start : hi - start]
        raise KeyError(f"elements {lo} to {hi} of {self._length} are not of this rank's chunks")
