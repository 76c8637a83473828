"""One rank's part of a sum in two levels (:mod:`fleet.protocol.two_level`): its sends, receives and additions, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from actors.rank.membership.process_group import Group, Transfer, Work
from actors.rank.step.early import Early
from actors.rank.tags import bucket_back, bucket_gathered, bucket_there
from fleet.protocol.chunks import cut_points
from fleet.protocol.shards import Additions, join
from fleet.protocol.two_level import ChunkPart, TwoLevel

Flats = Sequence[torch.Tensor]


@dataclass
class Leveled:
    """The buffers and messages of a bucket that travels in two levels.

    Attributes:
        landed: buffers for partial sums of this rank's chunk, by leaf; none for its own.
        gathered: buffers for the peers' sums that this rank combines, by part, in order. ``asked``: the receives into them.
        given: the sends to combiners, kept and not waited for. ``gathering``: the receives from the peers.
        crossing: the sends of the sums that this rank has combined. ``returning``: the receives of the sums that it will pass on.
    """

    landed: list[list[torch.Tensor]] = field(default_factory=list)
    gathered: list[list[torch.Tensor]] = field(default_factory=list)
    asked: list[Transfer] = field(default_factory=list)
    given: Work | None = None
    gathering: Work | None = None
    crossing: Work | None = None
    returning: Work | None = None


class Chunked(Protocol):
    """A bucket of flat buffers. Each rank owns a chunk of it."""

    leveled: Leveled

    def chunk(self, flats: Flats, rank: int) -> torch.Tensor: ...


def piece(chunk: torch.Tensor, part: ChunkPart) -> torch.Tensor:
    """The part ``part`` of ``chunk``."""
    cuts = cut_points(0, chunk.numel(), part.of)
    return chunk[cuts[part.lo] : cuts[part.hi]]


def add_in_place(leaves: list[torch.Tensor], arrived: list[bool], additions: Additions) -> None:
    """Add in place, each sum at its left summand's index. Only buffers that ``arrived`` are written: this rank's own sums stay as they are.

    At least one of two summands has arrived, or is a sum of such: this rank has added up its own sums before. The order within a pair does
    not change the bits of its sum.
    """
    for left, right in additions:
        into, other = (left, right) if arrived[left] else (right, left)
        leaves[left] = leaves[into].add_(leaves[other])
        arrived[left] = True


class Levels:
    """One rank's part, in one view.

    A peer's messages under one tag are in the order of owners, and for each owner in the order of the tree. So all ranks match messages
    alike.

    Attributes:
        additions: those of an owner, as pairs of indices into :meth:`leaves`.
        count: how many buffers a bucket needs for arriving sums.
    """

    def __init__(self, plan: TwoLevel, rank: int) -> None:
        self._rank, host = rank, plan.host_of(rank)
        self._near = [peer for peer in plan.hosts[host] if peer != rank]
        parts = list(plan.all_parts(host))
        self._mine = [part for part in parts if part.combiner == rank]
        self._theirs = [part for part in parts if part.combiner != rank]
        self._afar = {other: plan.parts(other, rank) for other in range(len(plan.hosts)) if other != host}
        self._contributed, (self._joins, self._joined) = plan.contributed(host), plan.combined(host)
        self._owned = plan.owned(host)
        self.additions, _ = join([leaf.block for leaf in self._owned], plan.shards)
        arriving = sum(leaf.rank != rank for leaf in self._contributed)
        self.count = sum(leaf.rank != rank for leaf in self._owned) + len(self._mine) * arriving

    def room_bytes(self, bucket: Chunked, flats: Flats) -> int:
        """Bytes of the largest buffer that a bucket needs."""
        mine = bucket.chunk(flats, self._rank).nbytes
        return max([mine, *(piece(bucket.chunk(flats, part.owner), part).nbytes for part in self._mine)])

    # ---- from each rank to the combiners, and to owners on its host ----------------------------------------------------------------------

    def sends(self, bucket: Chunked, local: Sequence[Flats]) -> list[Transfer]:
        """The sends of this rank's own sums to owners on this host."""
        return [(bucket.chunk(flats, peer), peer) for peer in self._near for flats in local]

    def give(self, group: Group, number: int, bucket: Chunked, local: Sequence[Flats]) -> None:
        """Send the peers on this host the parts of this rank's own sums that they combine."""
        contributions = [(piece(bucket.chunk(flats, part.owner), part), part.combiner) for part in self._theirs for flats in local]
        bucket.leveled.given = group.start(contributions, [], bucket_gathered(number))

    def make_room(self, bucket: Chunked, like: Flats, rooms: Iterator[torch.Tensor]) -> list[Transfer]:
        """Take one of ``rooms`` for each partial sum that comes. Gives the receives of this rank's own chunk."""
        mine, more, receives = bucket.chunk(like, self._rank), bucket.leveled, list[Transfer]()
        more.landed = [[] if leaf.rank == self._rank else [_like(next(rooms), mine)] for leaf in self._owned]
        for leaf, buffers in zip(self._owned, more.landed, strict=True):
            if leaf.rank >= 0:
                receives += [(buffer, leaf.rank) for buffer in buffers]
            else:
                receives += [(piece(buffer, part), part.combiner) for buffer in buffers for part in self._afar[leaf.host]]
        more.gathered, more.asked = [], []
        for part in self._mine:
            wanted = piece(bucket.chunk(like, part.owner), part)
            arriving = [(_like(next(rooms), wanted), leaf.rank) for leaf in self._contributed if leaf.rank != self._rank]
            more.gathered.append([buffer for buffer, _ in arriving])
            more.asked += arriving
        return receives

    def gather(self, group: Group, number: int, more: Leveled) -> None:
        """Ask the peers once for the sums that this rank combines."""
        if more.gathering is None:
            more.gathering = group.start([], more.asked, bucket_gathered(number))

    # ---- from hosts to owners ------------------------------------------------------------------------------------------------------------

    def combine(self, group: Group, number: int, bucket: Chunked, local: Sequence[Flats], early: Early | None = None) -> None:
        """Wait for the peers' sums, add up those of this host, and send them to owners on other hosts."""
        more = bucket.leveled
        assert more.gathering is not None
        more.gathering.arrived()
        if early is not None:
            early.own(number)
        more.crossing = group.start(self._combined(bucket, local), [], bucket_there(number))

    def _combined(self, bucket: Chunked, local: Sequence[Flats]) -> list[Transfer]:
        crossing: list[Transfer] = []
        for part, gathered in zip(self._mine, bucket.leveled.gathered, strict=True):
            coming = iter(gathered)
            own = [piece(bucket.chunk(flats, part.owner), part) for flats in local]
            arrived = [leaf.rank != self._rank for leaf in self._contributed]
            leaves = [next(coming) if one else own[leaf.number] for one, leaf in zip(arrived, self._contributed, strict=True)]
            add_in_place(leaves, arrived, self._joins)
            crossing += [(leaves[index], part.owner) for index in self._joined]
        return crossing

    def leaves(self, bucket: Chunked, local: Sequence[Flats]) -> tuple[list[torch.Tensor], list[bool]]:
        """(the partial sums of this rank's chunk, from left to right; which of them have arrived from a peer)."""
        landed, own = bucket.leveled.landed, [bucket.chunk(flats, self._rank) for flats in local]
        found = [one[0] if one else own[leaf.number] for one, leaf in zip(landed, self._owned, strict=True)]
        return found, [bool(one) for one in landed]

    # ---- the sums come back --------------------------------------------------------------------------------------------------------------

    def contributions(self, mine: torch.Tensor) -> list[Transfer]:
        """The sends of this rank's chunk of the sum: whole to each neighbour on this host, one part to each rank of another host."""
        afar = [(piece(mine, part), part.combiner) for parts in self._afar.values() for part in parts]
        return [(mine, peer) for peer in self._near] + afar

    def returns(self, bucket: Chunked, out: Flats) -> list[Transfer]:
        """The receives of the neighbours' sums, and of those that neighbours pass on."""
        own = [(bucket.chunk(out, peer), peer) for peer in self._near]
        return own + [(piece(bucket.chunk(out, part.owner), part), part.combiner) for part in self._theirs]

    def ask_back(self, group: Group, number: int, bucket: Chunked, out: Flats) -> None:
        """Ask for the sums that this rank will pass on."""
        wanted = [(piece(bucket.chunk(out, part.owner), part), part.owner) for part in self._mine]
        bucket.leveled.returning = group.start([], wanted, bucket_back(number))

    def pass_on(self, group: Group, number: int, bucket: Chunked, out: Flats) -> list[Work]:
        """Wait for these sums and send them to all neighbours. After the return the bucket's room is free: its sends have arrived."""
        more = bucket.leveled
        assert more.crossing is not None
        if more.returning is None:
            group.complete([more.crossing])
            return []
        more.returning.arrived()
        transfers = [(piece(bucket.chunk(out, part.owner), part), peer) for part in self._mine for peer in self._near]
        return [more.crossing, group.start(transfers, [], bucket_back(number))]


def _like(room: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return room[: like.nbytes].view(like.dtype)
