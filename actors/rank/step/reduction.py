"""The fixed-order sum of gradients: the same bits at any world size.

Each rank adds its own shards up the tree of ``fleet.protocol.shards`` (:mod:`actors.rank.step.sums`), which leaves one partial sum for each
block of its range. :class:`Reducer` then exchanges them. Each rank owns one chunk of each bucket, and receives the others' partial sums of
it. It adds them in tree order with explicit elementwise adds, and sends the result back. While each rank holds one block, the traffic is
that of a ring all-reduce. Each further block of a range adds one more chunk for each peer.

Where links differ, the ranks of a host first combine neighbours in the tree (:mod:`actors.rank.step.levels`). One partial sum then crosses
to another host, in place of one for each rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from actors.rank.membership.process_group import Group, Transfer, Work
from actors.rank.step.early import BACK, Added, Early
from actors.rank.step.landed import Landing
from actors.rank.step.levels import Leveled, Levels, add_in_place
from actors.rank.step.staging import Staging
from actors.rank.step.sums import Set, ShardSums
from actors.rank.tags import Tag, bucket_back, bucket_there
from fleet.errors import ConfigError, ProtocolError
from fleet.protocol.beside import travels_beside
from fleet.protocol.chunks import BLOCK, cut_points
from fleet.protocol.shards import Additions, Block, join
from fleet.protocol.two_level import TwoLevel, helps, hosts_of

BUCKET_BYTES = 8 << 20
"""Measured with ``benchmarks.reduction``: smaller buckets pay for their messages, larger ones overlap too little."""

SWAP_BYTES = 2 << 20
"""Piece size when two ranks send each other all their sums: they add up one piece while the next one travels."""

SWAPS_KEPT = 8
"""For so many sets of buffers a reducer remembers its pieces."""

BUCKETS_AT_LEAST, LEAST_BYTES = 4, 1 << 20
"""A flat buffer is cut into so many buckets, unless they would be smaller than that. A single bucket could not travel beside a backward."""

BUCKETS_IN_FLIGHT = 2
IN_FLIGHT_IN_LEVELS = 3
"""One bucket more: its combined sums are still on their way to owners on other hosts."""

KINDS = ("ordered", "native")


Layout = list[tuple[int, torch.dtype]]
Flats = Sequence[torch.Tensor]
"""One set of flat buffers."""
Local = Sequence[Flats]
"""A set of flat buffers for each of this rank's partial sums."""


def _layout(flats: Flats) -> Layout:
    return [(flat.numel(), flat.dtype) for flat in flats]


def _stretches(flat: torch.Tensor, most_bytes: int) -> list[tuple[int, int]]:
    """Cut a flat buffer into equal stretches of about ``most_bytes`` at most, and one block at least. Gives (first element, end) of
    each."""
    count = min(-(-flat.nbytes // most_bytes), -(-flat.numel() // BLOCK))
    return list(itertools.pairwise(cut_points(0, flat.numel(), count))) if count else []


def addition_plan(leaves: Sequence[Block], shards: int) -> Additions:
    """The order in which partial sums are added: pairs (left, right) of indices into ``leaves``; each sum takes the left one's place."""
    plan, left = join(leaves, shards)
    if len(left) != 1 or (leaves[0][0], leaves[-1][1]) != (0, shards):
        raise ProtocolError(f"the blocks {list(leaves)} do not make up the shards 0..{shards}")
    return plan


class Chunk(NamedTuple):
    """The elements ``lo..hi`` of one flat buffer."""

    flat: int
    lo: int
    hi: int


class Bucket:
    """One stretch of one flat buffer, on its way through the exchange."""

    def __init__(self, flat: int, lo: int, hi: int, size: int) -> None:
        self.flat, self.cuts = flat, cut_points(lo, hi, size)
        self.incoming: list[torch.Tensor] = []
        self.arrival: Work | None = None
        self.departure: Work | None = None  # the sends, kept and not waited for
        self.leveled = Leveled()

    def place(self, rank: int) -> Chunk:
        """The chunk that ``rank`` owns."""
        return Chunk(self.flat, self.cuts[rank], self.cuts[rank + 1])

    def chunk(self, flats: Flats, rank: int) -> torch.Tensor:
        flat, lo, hi = self.place(rank)
        return flats[flat][lo:hi]


class _Piece(NamedTuple):
    """One stretch of the sums that two ranks send each other."""

    sends: list[Transfer]
    receives: list[Transfer]
    leaves: list[torch.Tensor]  # the partial sums, from left to right
    arrive: list[bool]  # which of them come from the peer
    into: torch.Tensor


class _Cut(NamedTuple):
    buffers: list[torch.Tensor]  # the key holds their ids, so they have to stay alive
    pieces: list[_Piece]


class _Expected(NamedTuple):
    """Receives that began ahead of a reduction."""

    buckets: list[Bucket]
    layout: Layout
    landing: Landing | None  # of the first buckets; None where arrivals cannot be seen


class Reducer:
    """Sums gradients over all shards of all ranks. One object for the run; :meth:`bind` it to each view's group.

    Attributes:
        beside: whether some rank of the view may send while its backward runs.

    Args:
        shards: number of shards of the run.
        kind: ``ordered``, or ``native``: the library's all-reduce, whose bits depend on the world size.
        bucket_bytes: how much is exchanged at a time.
        two_levels: the ranks of a host add up their sums before these go to other hosts, where there are several hosts with several ranks.
        overlap_cores: see :func:`fleet.protocol.beside.travels_beside`; infinite: nothing travels beside a backward.
    """

    def __init__(
        self,
        shards: int,
        kind: str = "ordered",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        two_levels: bool = False,
        overlap_cores: float = 0.0,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError("reduction", kind, f"it is one of {', '.join(KINDS)}")
        self.shards, self.kind, self._bucket_bytes, self._two_levels = shards, kind, bucket_bytes, two_levels
        self._overlap_cores, self.beside = overlap_cores, False
        self._levels: Levels | None = None
        self._staging = Staging()
        self._expected: _Expected | None = None
        self._cut: dict[tuple[int, ...], _Cut] = {}
        self._group: Group | None = None
        self._buckets_before: list[Bucket] = []  # keeps their sends, which have arrived once the next reduction is over

    def bind(self, group: Group, leaves: Sequence[Sequence[Block]]) -> None:
        """Use ``group`` from now on; ``leaves[r]`` are the blocks whose sums view rank r brings, from left to right."""
        if group is not self._group:
            self._staging.begin_group()
        elif self._expected is not None:
            raise ProtocolError("bind() to the same group after expect()")
        self._group, self._expected, self._cut = group, None, {}
        self.blocks = tuple(leaves[group.rank])
        self.counts = [len(blocks) for blocks in leaves]
        order = sorted((block, rank, number) for rank, blocks in enumerate(leaves) for number, block in enumerate(blocks))
        self._order = [(rank, number) for _, rank, number in order]
        self._plan = addition_plan([block for block, _, _ in order], self.shards)
        self._peers = group.peers
        self._levels = self._levels_of(group, leaves)
        self.beside = self._travels_beside(group)

    def _travels_beside(self, group: Group) -> bool:
        """Whether some rank of this view may send while its backward runs. All ranks get the same answer: the cut of buckets depends on
        it."""
        possible = group.device.type == "cpu" and not math.isinf(self._overlap_cores)
        return possible and travels_beside(group.rooms, self._overlap_cores)

    def _levels_of(self, group: Group, leaves: Sequence[Sequence[Block]]) -> Levels | None:
        """The two levels of this view; None: one level. All ranks get the same answer, as all know each rank's host from the group."""
        hosts = hosts_of(group.sites)
        # NCCL's messages have no tags and go in the order of a stream. A sum to pass on would wait there for a receive that is not asked
        # for yet.
        if not (self._two_levels and self.kind == "ordered" and group.receives_ahead and helps(hosts)):
            return None
        return Levels(TwoLevel(hosts, tuple(map(tuple, leaves)), self.shards), group.rank)

    def reduce(self, sums: ShardSums[Set], out: Set, added: Added = tuple) -> None:
        """Put the mean over shards into ``out``, on every rank. Raises GroupBroken: then ``out`` is undefined, and ``sums`` as before.

        Integers are summed, not divided. ``added`` is called once, in the thread of ``Group.in_background``, as soon as this rank's own
        :meth:`parts` are summed. The work that it starts is complete, too, at the return.
        """
        group = self._group
        if group is None:
            raise ProtocolError("reduce() before bind()")
        local, flats = [partial.flats for partial in sums.partials(self.blocks)], out.flats
        if self._splits(flats):
            group.in_background(functools.partial(self._carry, group, self._open(group, flats), local, flats, added))
        else:
            group.in_background(functools.partial(self._sum_at_once, group, local, flats, added))

    def _sum_at_once(self, group: Group, local: Local, out: Flats, added: Added) -> None:
        beside = added()
        if self.kind == "native":
            self._native(group, local, out)
        elif group.size == 1:
            for into, whole in zip(out, *local, strict=True):  # one rank has all shards, so it has one sum
                into.copy_(whole)
                self.mean(into)
        else:
            self._swap(group, local, out)
        group.complete(beside)

    def _splits(self, flats: Flats) -> bool:
        """Whether each rank adds up a part of the sum. Else each rank or the library adds up all of it."""
        size = 1 if self._group is None else self._group.size
        return self.kind == "ordered" and size > 1 and not (size == 2 and self._swaps(flats))

    def parts(self, out: Flats) -> list[list[Chunk]]:
        """By view rank, the chunks of buffers like ``out`` that it alone adds up, in order; none where each rank adds up all."""
        assert self._group is not None
        buckets = self._buckets(out, self._group.size) if self._splits(out) else []
        return [[bucket.place(rank) for bucket in buckets] for rank in range(self._group.size)]

    def expect(self, like: Flats) -> None:
        """Ask for the peers' sums of the next :meth:`reduce`, as many as there is room for. Raises GroupBroken.

        So ranks that are done early send their sums while others still compute. ``like``: buffers of the same lengths as those that will be
        reduced. With other lengths reduce() raises GroupBroken, as receives cannot be taken back.
        """
        group = self._group
        if group is not None and group.receives_ahead and self._splits(like) and self._expected is None:
            buckets = self._new_buckets(group, like)
            first = buckets[:BUCKETS_IN_FLIGHT]
            asked = [self._incoming(number, bucket, like, ahead=True) for number, bucket in enumerate(first)]
            both = [*asked, *(bucket.leveled.asked for bucket in first)]
            known = group.device.type == "cpu"  # other devices receive into memory of the group
            landing = Landing([message for receives in both for message, _ in receives]) if known else None
            for number, (bucket, receives) in enumerate(zip(first, asked, strict=True)):
                bucket.arrival = group.start([], receives, bucket_there(number))
                if self._levels is not None:
                    self._levels.gather(group, number, bucket.leveled)
            self._expected = _Expected(buckets, _layout(like), landing) if buckets else None

    def ahead(self) -> tuple[int, int] | None:
        """(bytes that :meth:`expect` has asked for, bytes of them that are here). None where arrivals cannot be seen."""
        if self._expected is None:
            return 0, 0
        landing = self._expected.landing
        return None if landing is None else (landing.asked_bytes, landing.landed_bytes)

    def in_order(self, found: Mapping[int, Flats]) -> tuple[list[torch.Tensor], list[bool]]:
        """The arguments ``leaves`` and ``arrived`` of :meth:`add_up`. ``found``: by view rank, its partial sums of one stretch."""
        assert self._group is not None
        return [found[rank][number] for rank, number in self._order], [rank != self._group.rank for rank, _ in self._order]

    def add_up(self, leaves: list[torch.Tensor], arrived: list[bool], out: torch.Tensor, plan: Additions | None = None) -> None:
        """Put the mean of ``leaves``, added in tree order, into ``out``. Leaves that ``arrived`` are scratch; this rank's own sums stay."""
        plan = self._plan if plan is None else plan
        add_in_place(leaves, arrived, plan[:-1])
        if plan:
            left, right = plan[-1]
            torch.add(leaves[left], leaves[right], out=out)
        else:
            out.copy_(leaves[0])
        self.mean(out)

    def mean(self, total: torch.Tensor) -> None:
        """The sum of all shards becomes their mean, in place; integers stay as they are."""
        if not (total.is_floating_point() or total.is_complex()):
            return
        if self.shards & (self.shards - 1):
            total.div_(self.shards)
        else:
            total.mul_(1 / self.shards)  # exact, so the same bits, and twice as fast

    def _native(self, group: Group, local: Local, out: Flats) -> None:
        for into, *partials in zip(out, *local, strict=True):
            into.zero_() if not partials else into.copy_(partials[0])
            for other in partials[1:]:
                into.add_(other)
            group.all_reduce(into)
            self.mean(into)

    # ---- two ranks, and little to sum --------------------------------------------------------------------------------------------------

    def _swaps(self, flats: Flats) -> bool:
        """Whether two ranks give each other all that they have: the same traffic, half the messages, and both add all of it."""
        return len(flats) <= BUCKETS_IN_FLIGHT and all(flat.numel() * flat.element_size() <= self._bucket_bytes // 2 for flat in flats)

    def _swap(self, group: Group, local: Local, out: Flats) -> None:
        pieces = self._pieces(1 - group.rank, local, out)
        works = [group.start(piece.sends, piece.receives, bucket_there(number)) for number, piece in enumerate(pieces)]
        sent = group.sending(works)
        for piece, work in zip(pieces, works, strict=True):
            work.arrived()
            self.add_up(list(piece.leaves), list(piece.arrive), piece.into)
        sent()

    def _pieces(self, peer: int, local: Local, out: Flats) -> list[_Piece]:
        """The pieces of these buffers. The same few buffers come repeatedly, and to cut them each time took a tenth of a swap of 1 MB."""
        buffers = [*out, *itertools.chain(*local)]
        key = tuple(map(id, buffers))
        if key not in self._cut:
            if len(self._cut) == SWAPS_KEPT:
                self._cut.clear()
            self._cut[key] = _Cut(buffers, self._cut_up(peer, local, out))
        return self._cut[key].pieces

    def _cut_up(self, peer: int, local: Local, out: Flats) -> list[_Piece]:
        self._staging.fit(whole.nbytes for whole in out)
        pieces: list[_Piece] = []
        for number, whole in enumerate(out):
            landing = self._landing(whole, number, self.counts[peer], ahead=False)
            for lo, hi in _stretches(whole, SWAP_BYTES):
                theirs = [flat[lo:hi] for flat in landing]
                mine = [flats[number][lo:hi] for flats in local]
                leaves = [(theirs if rank == peer else mine)[index] for rank, index in self._order]
                sends, receives = [(part, peer) for part in mine], [(part, peer) for part in theirs]
                pieces.append(_Piece(sends, receives, leaves, [rank == peer for rank, _ in self._order], whole[lo:hi]))
        return pieces

    # ---- the exchange --------------------------------------------------------------------------------------------------------------------

    def _carry(self, group: Group, buckets: Sequence[Bucket], local: Local, out: Flats, added: Added, early: Early | None = None) -> None:
        """Exchange all buckets: partial sums of the next buckets travel while one bucket is added up and its sums travel back.

        With ``early`` the loop gives this rank's own sums. A bucket's room is free for the second bucket after it once its sums were added
        up. So
        the receives of that second bucket are asked for last.
        """
        returning: list[Work] = [] if buckets else [*added()]
        for number, following in enumerate(range(len(buckets) + BUCKETS_IN_FLIGHT), -BUCKETS_IN_FLIGHT):
            if number >= 0:
                bucket = buckets[number]
                self._await_peers(group, number, buckets, local, early)
                mine = bucket.chunk(out, group.rank)
                self.add_up(*self._leaves(group, bucket, local), mine, None if self._levels is None else self._levels.additions)
                if bucket is buckets[-1]:
                    returning += added()  # a few numbers that all ranks need, before the long message
                receives = [] if group.receives_ahead else self._returns(bucket, out)
                returning.append(group.start(self._contributions(bucket, mine), receives, bucket_back(number)))
                if self._levels is not None and number:
                    returning += self._levels.pass_on(group, number - 1, buckets[number - 1], out)
            if following < len(buckets):
                bucket = buckets[following]
                returns, sends, receives = self._next(group, following, bucket, local, out, early)
                if returns:
                    returning.append(group.start([], returns, bucket_back(following)))
                if bucket.arrival is None:
                    bucket.arrival = group.start(sends, receives, bucket_there(following))
                elif sends:
                    bucket.departure = group.start(sends, [], bucket_there(following))
                self._begin_levels(group, following, bucket, local, out, early)
        if self._levels is not None and buckets:
            returning += self._levels.pass_on(group, len(buckets) - 1, buckets[-1], out)
        group.complete(returning)
        self._buckets_before = [*buckets]

    def _await_peers(self, group: Group, number: int, buckets: Sequence[Bucket], local: Local, early: Early | None) -> None:
        """Wait until all sums of one bucket are here."""
        arrival = buckets[number].arrival
        assert arrival is not None
        if self._levels is not None:
            for ahead in range(number + (number > 0), min(number + 2, len(buckets))):
                self._levels.combine(group, ahead, buckets[ahead], local, early)
        arrival.arrived()  # its sends have arrived once the peers return their sums
        if early is not None:
            early.arrived(number)
            if self._levels is None:
                early.own(number)

    def _comes_back(self, bucket: Bucket) -> bool:
        """Whether all ranks get the sums of this bucket."""
        return True

    def _contributions(self, bucket: Bucket, mine: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """The sends of this rank's chunk of the sum."""
        if self._levels is not None:
            return self._levels.contributions(mine)
        return [(mine, peer) for peer in self._peers]

    def _returns(self, bucket: Bucket, out: Flats) -> list[tuple[torch.Tensor, int]]:
        """The receives of the peers' chunks of the sum."""
        if self._levels is not None:
            return self._levels.returns(bucket, out)
        return [(bucket.chunk(out, peer), peer) for peer in reversed(self._peers)]

    def _buckets(self, flats: Flats, size: int) -> list[Bucket]:
        """Cut all flat buffers into buckets of equal length, at most ``bucket_bytes``. The first buckets hold the first gradients of a
        backward."""
        cuts = [(index, _stretches(flat, self._most_bytes(flat))) for index, flat in enumerate(flats)]
        places = [(number / len(cut), index, lo, hi) for index, cut in cuts for number, (lo, hi) in enumerate(cut, 1)]
        return [Bucket(index, lo, hi, size) for _, index, lo, hi in sorted(places, reverse=True)]

    def _most_bytes(self, flat: torch.Tensor) -> int:
        """The size of a bucket: beside a backward buckets are smaller, so that a few are complete before its end."""
        return self._bucket_bytes if not self.beside else min(self._bucket_bytes, max(LEAST_BYTES, -(-flat.nbytes // BUCKETS_AT_LEAST)))

    def _open(self, group: Group, out: Flats) -> list[Bucket]:
        """The buckets of a reduction: those of :meth:`expect`, if it was called."""
        expected, self._expected = self._expected, None
        if expected is None:
            return self._new_buckets(group, out)
        if expected.layout != _layout(out):
            raise group.broken("other parameters train in this step than in the last")
        return expected.buckets

    def _new_buckets(self, group: Group, flats: Flats) -> list[Bucket]:
        """Buckets, and room for their arriving sums."""
        buckets, levels = self._buckets(flats, group.size), self._levels
        self._staging.fit(
            bucket.chunk(flats, group.rank).nbytes if levels is None else levels.room_bytes(bucket, flats) for bucket in buckets
        )
        return buckets

    def _incoming(self, number: int, bucket: Bucket, flats: Flats, *, ahead: bool) -> list[Transfer]:
        """The receives of the peers' partial sums of this rank's chunk. ``ahead`` of the reduction none goes into ``flats``."""
        assert self._group is not None
        mine = bucket.chunk(flats, self._group.rank)
        if self._levels is not None:
            rooms = self._staging.buffers(mine.device, number % IN_FLIGHT_IN_LEVELS, IN_FLIGHT_IN_LEVELS, self._levels.count)
            return self._levels.make_room(bucket, flats, iter(rooms))
        sources = [peer for peer in reversed(self._peers) for _ in range(self.counts[peer])]
        bucket.incoming = self._landing(mine, number % BUCKETS_IN_FLIGHT, len(sources), ahead=ahead)
        return list(zip(bucket.incoming, sources, strict=True))

    def _next(self, group: Group, number: int, bucket: Bucket, local: Local, out: Flats, early: Early | None) -> tuple[list[Transfer], ...]:
        """(receives of the peers' sums, sends of this rank's partial sums, receives of the peers' partial sums of this rank's chunk).

        The peers' sums may be asked for now: gloo sends no message before it knows of the receive. They are asked for first. So a peer that
        has this rank's partial sums may send back its sum.
        """
        returns = self._returns(bucket, out) if group.receives_ahead else []
        receives = [] if bucket.arrival is not None else self._incoming(number, bucket, out, ahead=False)
        if early is not None:
            early.coming(number, receives if bucket.arrival is not None else [*receives, *bucket.leveled.asked])
            early.coming(BACK, returns)
        return returns, self._sends(bucket, local) if early is None else [], receives

    def _begin_levels(self, group: Group, number: int, bucket: Bucket, local: Local, out: Flats, early: Early | None) -> None:
        """Begin the exchange within this host of a bucket whose sums cross to other hosts."""
        if self._levels is None:
            return
        self._levels.gather(group, number, bucket.leveled)
        if early is None:
            self._levels.give(group, number, bucket, local)
        if self._comes_back(bucket):
            self._levels.ask_back(group, number, bucket, out)

    def _sends(self, bucket: Bucket, local: Local) -> list[Transfer]:
        """The sends of this rank's own partial sums."""
        if self._levels is not None:
            return self._levels.sends(bucket, local)
        return [(bucket.chunk(flats, peer), peer) for peer in self._peers for flats in local]

    # ---- while this rank's last shard is computed ----------------------------------------------------------------------------------------

    def overlaps(self, like: Flats) -> bool:
        """Whether buffers like these can be exchanged bucket by bucket while this rank still computes: see :meth:`begin`."""
        group = self._group
        if group is None or not (self.beside and group.works_in_background and group.receives_ahead and self._splits(like)):
            return False
        return self._expected is None or self._expected.layout == _layout(like)

    def stretches(self, like: Flats) -> list[list[Chunk]]:
        """By bucket, in the order of the exchange: its chunks in buffers like these."""
        assert self._group is not None
        size = self._group.size
        return [[bucket.place(rank) for rank in range(size)] for bucket in self._buckets(like, size)]

    def begin(self, local: Local, out: Flats) -> Early:
        """Begin a reduction into ``out`` before the loop calls for it, see :class:`Early`.

        ``local``: the flat buffers of this rank's partial sums, which are not complete yet. The caller completes them bucket by bucket,
        gives
        each one, and finishes the exchange.
        """
        group, expected = self._group, self._expected
        assert group is not None
        buckets = self._open(group, out)

        def send(number: int) -> None:
            buckets[number].departure = group.start(self._sends(buckets[number], local), [], bucket_there(number))
            if self._levels is not None:
                self._levels.give(group, number, buckets[number], local)

        early = Early(group, len(buckets), send)
        if expected is not None and expected.landing is not None:
            early.asked(min(BUCKETS_IN_FLIGHT, len(buckets)) - 1, expected.landing)
        early.run(lambda: self._carry(group, buckets, local, out, early.added, early))
        return early

    def _leaves(self, group: Group, bucket: Bucket, local: Local) -> tuple[list[torch.Tensor], list[bool]]:
        """(the partial sums of this rank's chunk, from left to right; which of them have arrived from a peer)."""
        if self._levels is not None:
            return self._levels.leaves(bucket, local)
        arrived = iter(bucket.incoming)
        found = {peer: [next(arrived) for _ in range(self.counts[peer])] for peer in reversed(self._peers)}
        found[group.rank] = [bucket.chunk(flats, group.rank) for flats in local]
        return self.in_order(found)

    def _landing(self, mine: torch.Tensor, half: int, count: int, *, ahead: bool) -> list[torch.Tensor]:
        """Buffers for ``count`` partial sums of ``mine``. Unless ``ahead`` the first is ``mine`` itself, and the others are added to it in
        place."""
        staged = self._staging.buffers(mine.device, half, BUCKETS_IN_FLIGHT, count)
        buffers = [room[: mine.nbytes].view(mine.dtype) for room in staged]
        return [mine, *buffers[1:]] if count and not ahead else buffers


class SideChannel:
    """A few numbers from every rank to every rank, travelling beside the gradients: flags, arrival times, losses."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._all = torch.zeros(group.size, 0, dtype=torch.float64, device="cpu")
        self._work: Work | None = None
        self._before: deque[Work] = deque(maxlen=2)  # keeps sends that are not waited for: two exchanges later they have arrived

    def listen(self, count: int) -> None:
        """Ask for ``count`` numbers of each rank, before :meth:`start`: gloo sends no message before it knows of the receive."""
        if self._all.shape[1] != count:
            self._all = torch.zeros(self._group.size, count, dtype=torch.float64, device="cpu")
        self._work = self._group.start([], [(self._all[peer], peer) for peer in self._group.peers], Tag.SIDE)

    def start(self, values: Sequence[float] | torch.Tensor) -> Work:
        """Send ``values`` to all ranks; each rank sends as many. Once the returned work has arrived, :meth:`take` has all ranks'
        numbers."""
        if self._work is None:
            self.listen(len(values))
        assert self._work is not None
        mine = torch.as_tensor(values, dtype=torch.float64, device="cpu")
        self._all[self._group.rank].copy_(mine)
        self._before.append(self._group.start([(mine, peer) for peer in self._group.peers], [], Tag.SIDE))
        return self._work

    def take(self) -> torch.Tensor:
        """All ranks' numbers, ``[size, numbers]``; valid until the next :meth:`start`."""
        if self._work is None:
            raise ProtocolError("SideChannel.take() before start()")
        self._work = None
        return self._all
