"""Parameters come to a rank, and its gradients leave it, while it computes: its requests to its peers, and theirs to it.

A fetch and a contribution belong to a state and to one attempt at its step. A rank lets those of another state or attempt wait, or refuses
them: :func:`fleet.protocol.chunks.can_serve` and :func:`fleet.protocol.chunks.can_accept` decide.

:class:`Sender` knows which contributions of this rank are on their way; threads of :mod:`actors.rank.fsdp.sending` carry them.
:class:`Sums` adds up contributions up the tree of :mod:`fleet.protocol.shards`. The order of their arrival does not matter, so the bits are
those of any other reduction of the same shards. :class:`PeerExchange` combines these.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from actors.rank.fsdp.ahead import AheadFetch, FlatGathering, GatherOrder, Wanted
from actors.rank.fsdp.chunks import ChunkedModel
from actors.rank.fsdp.sending import Contribution, PeerSender
from actors.rank.fsdp.serving import LOOK_S, Address, FetchRequest, PeerFetcher, PeerRequest, PeerServer, Served
from actors.rank.membership.process_group import Group, GroupBroken, Interrupted
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.layout import LayoutInputs
from actors.rank.step.sums import ShardSums
from actors.rank.tags import Tag
from fleet.errors import FleetError
from fleet.protocol.adding import GRACE_S, Adders
from fleet.protocol.chunks import LATEST_S, SILENT_S, Chunk, Readiness, StateCut, bounds, can_accept, can_serve
from fleet.protocol.records import COMM
from fleet.protocol.types import StateId

ADDRESS_BYTES = 96
UNDER_WAY_BYTES = 64 << 20
"""A backward that is faster than its links waits when so much is on its way."""
SUM = -1
"""In the place of a shard: the contribution is the mean over all shards."""

Stretch = tuple[int, int, int]
"""(flat buffer, from, to)."""


class _Meeting(NamedTuple):
    """The members of a view: the addresses at which they serve, its generation, and this rank's number."""

    addresses: Sequence[Address]
    generation: int
    rank: int


class PeerExchange:
    """One rank's part in the exchange. The loop's thread makes it.

    Args:
        chunks: the chunks that this rank keeps.
        mean: turns the sum of all shards into their mean, in place.

    Attributes:
        missed: why the computation of the current shard is of no use; empty while it is of use.
        in_shard: the rank computes a shard.
    """

    def __init__(
        self, given: LayoutInputs, gradients: GradientBuffers, chunks: ChunkedModel, mean: Callable[[torch.Tensor], None]
    ) -> None:  # fmt: skip
        self._given, self._gradients, self._chunks = given, gradients, chunks
        self._moved = threading.Condition()
        self._addresses: Sequence[Address] = ()
        self._met = _Meeting(self._addresses, -1, 0)
        self._adders = Adders(given.settings.shards)
        self._asked: Sequence[tuple[int, ...]] = ()
        self.missed, self.in_shard = "", False
        self._still, self._changes = True, 0
        self._loop = threading.get_ident()
        self._patience_s = min(SILENT_S, given.settings.timeouts.collective_s)
        self._sums, self._sender = Sums(given.settings.shards, mean), Sender(given.called_away, self._patience_s)
        self._server = PeerServer(given.host, self._serve, self)
        self._ahead = AheadFetch(self._try)
        self.fetcher = PeerFetcher(self._patience, self._patience_s)

    def close(self) -> None:
        """Nothing is served, fetched or contributed any more."""
        self._server.close()
        self._ahead.close()
        self.fetcher.close()
        self._sender.close()

    @property
    def useless(self) -> str:
        """Why the loop body's current computation does not count; empty while it counts.

        Where a guard adds up beside the owner, a shard may count in the next view though one of them is lost.
        """
        return self.missed or ("" if self._adders.twice else self._sender.failed)

    def _patience(self) -> float:
        """Seconds for which a server may be silent now."""
        if self._ahead.dropped:
            return 0.0
        called_away = self.in_shard and self._given.called_away()
        return (GRACE_S if self._adders.twice else 0.0) if called_away else self._patience_s

    # ---- this rank's place in the view ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Context in which this rank's chunks or their state change: fetches wait."""
        self._stand(still=False)
        try:
            yield
        finally:
            self._stand(still=True)

    def _stand(self, *, still: bool) -> None:
        """Set whether this rank's chunks stay as they are. Threads that wait to serve a fetch check again."""
        with self._moved:
            self._still = still
            self._changes += not still
            self._moved.notify_all()

    def introduce(self, group: Group) -> None:
        """Exchange the addresses of a view's members, before chunks are placed. Raises GroupBroken."""
        rows = torch.zeros(group.size, ADDRESS_BYTES, dtype=torch.uint8, device="cpu")
        mine = self._server.address.packed().ljust(ADDRESS_BYTES, b"\0")
        group.all_gather(rows, torch.frombuffer(bytearray(mine), dtype=torch.uint8), Tag.CLAIM)
        addresses = [Address.unpacked(row.numpy().tobytes()) for row in rows]
        self._met = _Meeting(addresses, group.generation, group.rank)

    def place(self, cut: StateCut, asked: Sequence[tuple[int, ...]], *, inherited: bool) -> None:
        """This rank has its chunks of the view that was introduced last, and the step begins or goes on. Then call :meth:`count`.

        Args:
            asked: by chunk, the ranks that this rank asks for it, in order.
            inherited: no chunk has moved, so the step may go on.
        """
        self.missed = ""
        self._sender.begin()
        addresses, generation, rank = self._met
        with self._moved:
            self._addresses, self._asked = addresses, asked
            if self._adders.place(cut, rank, len(addresses), generation, self._given.duties.at, inherited=inherited):
                self._sums.go_on(*self._stretches())
            else:
                self._sums.begin(*self._stretches())

    def turn_to(self, cut: StateCut, asked: Sequence[tuple[int, ...]]) -> None:
        """This rank has its chunks of another cut, at the beginning of a step. Call it within :meth:`moving`."""
        self._asked = asked
        self._adders.turn_to(cut)

    @property
    def adding(self) -> Collection[Chunk]:
        """The chunks whose gradients this rank adds up."""
        return self._adders.claimed

    @property
    def there(self) -> Collection[int]:
        """The shards whose gradients this rank has, of all chunks that it owns."""
        return self._sums.held(self._stretches_of(self._adders.owned))

    def count(self, shards: Collection[int]) -> None:
        """Of the present step, ``shards`` count in this view: their gradients are with all owners."""
        with self._moved:
            if not shards:
                self.begin_step()
            self._adders.agree(shards)
            complete = self._sums.complete(self._stretches_of(self._adders.owned))
            self._moved.notify_all()
        for stretch, mean in complete.items():
            self._send_mean(stretch, mean)

    def _stretches(self) -> tuple[list[Stretch], list[Stretch]]:
        """(those that this rank adds up, those that it only guards)."""
        return self._stretches_of(self._adders.added), self._stretches_of(self._adders.guarded)

    def _stretches_of(self, chunks: Iterable[int]) -> list[Stretch]:
        """Chunks, in all flat buffers whose gradients leave."""
        size, leaving = self._adders.cut.size, sorted(self._gradients.layout.leaving)
        spans = [(flat, *bounds(self._chunks.extents[flat], (size, index))) for index in chunks for flat in leaving]
        return [(flat, lo, hi) for flat, lo, hi in spans if lo < hi]

    def begin_step(self) -> None:
        """The state is that of the next step, without contributions yet."""
        with self._moved:
            self._adders.begin_step(self._given.duties.at)
            self._sums.begin(*self._stretches())

    def repeat(self) -> None:
        """All ranks compute the step once more: contributions of the last attempt are refused."""
        with self._moved:
            self._adders.repeat()
            self.begin_step()
            self._moved.notify_all()

    # ---- fetches -------------------------------------------------------------------------------------------------------------------------

    def _serve(self, wanted: StateId, flat: int, lo: int, hi: int) -> Served | None:
        """Answer a fetch, from any thread.

        For a rank of the view, the elements do not change before it has them: the step that changes them waits for its gradients. A rank
        that
        has left the view may ask while a step is taken. The answer then says that the elements have changed.
        """
        latest_s = time.monotonic() + LATEST_S
        with self._moved:
            while (ready := self._can_serve(wanted)) is Readiness.LATER and time.monotonic() < latest_s:
                self._moved.wait(LOOK_S)
            if ready is not Readiness.NOW:
                return None
            found, changes = self._chunks.elements(flat, lo, hi), self._changes
        return None if found is None else Served(found, lambda: self._changes == changes)

    def _can_serve(self, wanted: StateId) -> Readiness:
        return can_serve(self._given.duties.at, wanted, still=self._still, left=self._given.outside())

    def fill(self, flat: int, memory: torch.Tensor) -> None:
        """Put all parameters of a flat buffer into ``memory``."""
        with self._given.recorder.during(COMM) if threading.get_ident() == self._loop else contextlib.nullcontext():
            gathering = self._ahead.take(flat) or self._gathering(flat, memory)
            self._fetch(gathering.wanted)
            for request in () if memory.is_cpu else gathering.requests:
                memory[request.lo : request.hi].copy_(request.into)

    @property
    def order(self) -> GatherOrder[int]:
        """The order in which this rank gathers units."""
        return self._ahead.order

    def ask(self, flats: Mapping[int, torch.Tensor]) -> None:
        """Fetch flat buffers into their memory beside the computation. Then :meth:`fill` each of them, or :meth:`drop` all."""
        self._ahead.ask([self._gathering(flat, memory) for flat, memory in flats.items()])

    def drop(self) -> None:
        """Give up the fetch beside the computation. Its memory may be freed afterwards."""
        self._ahead.drop()

    def _try(self, wanted: Sequence[Wanted]) -> list[int]:
        """Ask the first server of each stretch. Returns the numbers of stretches that it could not fill."""
        assert self._given.duties.at is not None, "before its first view a rank has all parameters"
        return self.fetcher.fetch(self._given.duties.at, [(self._addresses[keepers[0]], request) for keepers, request in wanted])

    def _gathering(self, flat: int, memory: torch.Tensor) -> FlatGathering:
        """Copy this rank's own chunks. The others are to be fetched from the ranks that serve them."""
        size, extent = self._adders.cut.size, self._chunks.extents[flat]
        host = memory if memory.is_cpu else torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True, device="cpu")
        wanted = list[Wanted]()
        for index in range(size):
            lo, hi = bounds(extent, (size, index))
            mine = self._chunks.elements(flat, lo, hi)
            if mine is not None:
                memory[lo:hi].copy_(mine)
            elif lo < hi:
                wanted.append((self._asked[index], FetchRequest(flat, lo, hi, host[lo:hi])))
        return FlatGathering(flat, [request for _, request in wanted], wanted)

    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fetch each stretch from the first server that has it. Without a server it is zero, and the shard's computation is of no use."""
        while wanted and not self.missed:
            if all(keepers for keepers, _ in wanted):
                wanted = [(wanted[number][0][1:], wanted[number][1]) for number in self._try(wanted)]
            if any(not keepers for keepers, _ in wanted):
                self._miss(wanted)
        for _, request in wanted:
            request.into.zero_()

    def _miss(self, wanted: Sequence[Wanted]) -> None:
        _, request = next((keepers, request) for keepers, request in wanted if not keepers)
        reason = f"no rank of the view gives elements {request.lo} to {request.hi} of flat buffer {request.flat} of the parameters"
        if not self.in_shard and self._given.alone():
            raise Interrupted(reason)
        if not self.in_shard:
            raise FleetError(f"{reason}, which something outside of a step needs")
        self.missed = reason

    # ---- gradients that leave ------------------------------------------------------------------------------------------------------------

    def send(self, shard: int, packed: Mapping[int, torch.Tensor]) -> None:
        """Send the ranks that add up a chunk its stretch of the gradient of ``shard``. ``packed``: the whole gradient, by flat buffer."""
        if not self._addresses or self.useless:  # a rehearsal; or some parameters were missing in the computation
            return
        for flat, whole in packed.items():
            host = whole.cpu()
            for index, keepers in enumerate(self._adders.cut.keepers):
                lo, hi = bounds(self._chunks.extents[flat], (self._adders.cut.size, index))
                for adder in self._adders.of(keepers) if lo < hi else ():
                    self._contribute(adder, shard, (flat, lo, hi), host[lo:hi])

    def _contribute(self, adder: int, shard: int, stretch: Stretch, elements: torch.Tensor) -> None:
        if adder != self._adders.rank:
            self._sender.send(self._addresses[adder], self._contribution(stretch, shard), elements)
            return
        with self._moved:
            self._count(stretch, shard, elements.clone())  # a view would keep the memory of the whole
            self._moved.notify_all()

    def leave(self) -> None:
        """This rank leaves its view: give its contributions a moment to arrive, since they may count in the next view."""
        if self._adders.twice:
            self._sender.drain(GRACE_S)

    def flush(self, group: Group) -> None:
        """Wait until all contributions of this rank have arrived. Raises GroupBroken."""
        self._given.recorder.switch(COMM)
        missed, self.missed = self.missed or self._sender.flush(), ""
        if missed:
            raise GroupBroken(missed, group.generation)

    # ---- contributions of other ranks, from any thread -----------------------------------------------------------------------------------

    def room(self, request: PeerRequest) -> torch.Tensor:
        if request.flat not in self._gradients.layout.leaving or not 0 <= request.lo < request.hi <= self._chunks.extents[request.flat]:
            raise ConnectionError(
                f"a contribution of elements {request.lo} to {request.hi} of flat buffer {request.flat}, which is none here"
            )
        return torch.empty(request.hi - request.lo, dtype=self._gradients.layout.meta[request.flat].dtype, device="cpu")

    def take(self, request: PeerRequest, elements: torch.Tensor) -> bool:
        stretch = (request.flat, request.lo, request.hi)
        with self._moved:
            self._moved.wait_for(lambda: self._fate(request) is not Readiness.LATER, LATEST_S)
            known = self._sums.keeps(stretch) if request.shard == SUM else self._sums.adds(stretch)
            if self._fate(request) is not Readiness.NOW or not known:
                return False
            self._count(stretch, request.shard, elements)
            self._moved.notify_all()
        return True

    def _fate(self, request: PeerRequest) -> Readiness:
        here, still = (self._given.duties.at, self._adders.turn), self._still and self._adders.agreed
        return can_accept(here, (request.state, request.turn), still=still)

    def _count(self, stretch: Stretch, shard: int, elements: torch.Tensor) -> None:
        if shard == SUM:
            self._sums.know(stretch, elements)
        elif (mean := self._sums.add(stretch, shard, elements)) is not None:
            self._send_mean(stretch, mean)

    def _send_mean(self, stretch: Stretch, mean: torch.Tensor) -> None:
        """Send the mean of a chunk to guards that may lack it, if this rank owns the chunk."""
        for index in self._adders.owned:
            for guard, needed in self._adders.guards(index) if stretch in self._stretches_of([index]) else ():
                # without a wait, as a thread that waits here receives nothing
                request, address = self._contribution(stretch, SUM), self._addresses[guard]
                self._sender.send(address, request, mean, waits=False, needed=needed)

    def _contribution(self, stretch: Stretch, shard: int) -> PeerRequest:
        assert self._given.duties.at is not None
        return PeerRequest(self._given.duties.at, *stretch, contribution=True, turn=self._adders.turn, shard=shard)

    def means(self, group: Group, divisor: float) -> dict[int, Means]:
        """This rank's means, by flat buffer.

        Call it once all ranks have reported that their shards are with the owners. It waits for the owners' means that this rank guards.
        """
        error = self._sender.flush()
        with self._moved:
            self._moved.wait_for(lambda: not self._sums.missing or self._sender.failed, LATEST_S)
            missing = self._sums.missing
            if error or missing:
                flat, lo, hi = missing[0] if missing else (0, 0, 0)
                raise GroupBroken(error or f"no mean of elements {lo} to {hi} of flat buffer {flat} has come", group.generation)
            found = self._sums.means(divisor)
        layout, extents = self._gradients.layout.meta, self._chunks.extents
        device = self._gradients.parameters[0].device
        return {
            flat: Means(
                extents[flat],
                {(lo, hi): mean.to(device) for (number, lo, hi), mean in found.items() if number == flat},
                torch.empty(0, dtype=layout[flat].dtype, device=device),
            )
            for flat in sorted(self._gradients.layout.leaving)
        }


class Sender:
    """Carries contributions to other ranks: to all peers at once, to each peer in order.

    Attributes:
        failed: why a contribution has not arrived, or was of no use to its receiver; empty without an error.

    Args:
        called_away: whether the view is about to change.
        patience_s: a receiver may be silent for so long.
    """

    def __init__(self, called_away: Callable[[], bool], patience_s: float) -> None:
        self._called_away, self._patience_s = called_away, patience_s
        self._changed = threading.Condition()
        self._peers: dict[Address, PeerSender] = {}
        self._lost: set[Address] = set()
        self._under_way = self._bytes = 0
        self._away_s = math.inf
        self.failed = ""

    def send(self, address: Address, request: PeerRequest, elements: torch.Tensor, *, waits: bool = True, needed: bool = True) -> None:
        """``elements`` are flat, in host memory, and stay as they are until they have arrived.

        Args:
            waits: until there is room. A thread that receives contributions must not wait.
            needed: false where the receiver may have it already.
        """
        if waits:
            self._wait(lambda: self._bytes < UNDER_WAY_BYTES)
        with self._changed:
            if address in self._lost:
                return
            if address not in self._peers:
                self._peers[address] = PeerSender(address, self._patience_s, self._ended)
            self._under_way, self._bytes = self._under_way + 1, self._bytes + elements.nbytes
            self._peers[address].contribute(Contribution(request, elements, needed))

    def flush(self) -> str:
        """Wait until all contributions have arrived. Returns the reason if one has not, else empty."""
        self._wait(lambda: not self._under_way)
        with self._changed:
            if self._under_way and not self.failed:
                self.failed = "this rank was called away before all its gradients had arrived"
            return self.failed

    def drain(self, limit_s: float) -> None:
        """Wait for what is under way to peers that can be reached, ``limit_s`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, limit_s)

    def begin(self) -> None:
        """A new view: drop the contributions of the last one."""
        with self._changed:
            peers, self._peers, self._lost = list(self._peers.values()), {}, set()
            self._under_way = self._bytes = 0
            self._away_s, self.failed = math.inf, ""
        for peer in peers:
            peer.end()

    close = begin

    def _wait(self, enough: Callable[[], bool]) -> None:
        with self._changed:
            while not enough() and not self.failed:
                self._changed.wait(LOOK_S)
                now_s = time.monotonic()
                self._away_s = min(self._away_s, now_s) if self._called_away() else math.inf
                if now_s > self._away_s + GRACE_S:
                    return

    def _ended(self, peer: PeerSender, contribution: Contribution, error: str) -> None:
        with self._changed:
            if self._peers.get(peer.address) is not peer:  # of an earlier view
                return
            self._under_way, self._bytes = self._under_way - 1, self._bytes - contribution.elements.nbytes
            if error and contribution.needed:
                self.failed = self.failed or error
                self._lost.add(peer.address)
            self._changed.notify_all()


class _Flat(NamedTuple):
    flats: Sequence[torch.Tensor]


class Sums:
    """The mean gradient of this rank's chunks. It adds up those of chunks that it owns; owners send it those of chunks that it guards.

    Not for several threads at a time.

    Args:
        shards: of the run.
        mean: turns the sum of all shards into their mean, in place.
    """

    def __init__(self, shards: int, mean: Callable[[torch.Tensor], None]) -> None:
        self._shards, self._mean = shards, mean
        self._sums: dict[Stretch, ShardSums[_Flat]] = {}
        self._found: dict[Stretch, torch.Tensor | None] = {}

    def begin(self, adding: Iterable[Stretch], guarded: Iterable[Stretch]) -> None:
        """A step begins without contributions. This rank adds up the chunks ``adding``, and is told the means of those ``guarded``."""
        self._sums = {stretch: self._empty() for stretch in adding}
        self._found = dict.fromkeys([*self._sums, *guarded])

    def go_on(self, adding: Iterable[Stretch], guarded: Iterable[Stretch]) -> None:
        """The step goes on in another view, with the sums that are here."""
        before = self._sums
        self.begin(adding, guarded)
        for stretch in self._sums.keys() & before.keys():
            self._sums[stretch] = sums = before[stretch]
            if sums.blocks == ((0, self._shards),):
                self._found[stretch] = sums.partials(sums.blocks)[0].flats[0]

    def held(self, stretches: Collection[Stretch]) -> Collection[int]:
        """The shards that are in the sums of all these chunks."""
        found = set(range(self._shards))
        for stretch in stretches:
            found &= self._sums[stretch].held
        return found

    def complete(self, stretches: Iterable[Stretch]) -> dict[Stretch, torch.Tensor]:
        """The means of those of these chunks that have all shards."""
        return {stretch: mean for stretch in stretches if (mean := self._found[stretch]) is not None}

    def _empty(self) -> ShardSums[_Flat]:
        def make() -> _Flat:
            raise AssertionError("each shard brings its own memory")

        return ShardSums(self._shards, make)

    def add(self, stretch: Stretch, shard: int, elements: torch.Tensor) -> torch.Tensor | None:
        """Add one shard's gradient, whose memory belongs to this object from now on. Returns the mean after the last shard.

        A shard that comes again has the same bits, as it is computed from the same state: it does not count twice.
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
        """Keep the mean of a chunk that this rank guards, from the chunk's owner, unless it is here."""
        if self._found[stretch] is None:
            self._found[stretch] = mean

    def adds(self, stretch: Stretch) -> bool:
        return stretch in self._sums

    def keeps(self, stretch: Stretch) -> bool:
        return stretch in self._found

    @property
    def missing(self) -> list[Stretch]:
        """The stretches without a mean so far."""
        return [stretch for stretch, mean in self._found.items() if mean is None]

    def means(self, divisor: float = 1.0) -> Mapping[Stretch, torch.Tensor]:
        """All means, divided by ``divisor``. Raises KeyError when one is missing."""
        if self.missing:
            raise KeyError(self.missing[0])
        found = {stretch: mean for stretch, mean in self._found.items() if mean is not None}
        return found if divisor in (0.0, 1.0) else {stretch: mean / divisor for stretch, mean in found.items()}


class Means:
    """Replaces a flat buffer of the mean gradient: this rank has only the stretches of its chunks."""

    def __init__(self, length: int, stretches: Mapping[tuple[int, int], torch.Tensor], like: torch.Tensor) -> None:
        self._length, self._stretches, self._none = length, dict(stretches), like[:0]
        self.dtype = like.dtype

    def room(self, lo: int, hi: int) -> torch.Tensor:
        """Memory for one more stretch, which the caller fills."""
        self._stretches[lo, hi] = found = self._none.new_empty(hi - lo)
        return found

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
