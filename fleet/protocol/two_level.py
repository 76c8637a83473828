"""Sums in two levels: first the ranks of a host add up their partial sums, then the results cross to other hosts. Pure.

Every rank owns one chunk of the sum. The ranks of another host combine their partial sums of that chunk on their host. They add only blocks
that are neighbours in the fixed tree of :mod:`fleet.protocol.shards`, so the order of the sum depends on shards alone. The remaining
blocks, one or a few, cross to the owner. The sum crosses back once, and a rank passes it on within its host. Ranks are on one *host* when
they share a site: see :func:`fleet.protocol.domains.site_of`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fleet.protocol.shards import Additions, Block, join


class ChunkPart(NamedTuple):
    """The parts ``lo..hi`` of the chunk of ``owner``, cut into ``of`` equal parts. ``combiner`` adds them up for its host."""

    owner: int
    combiner: int
    lo: int
    hi: int
    of: int


class Leaf(NamedTuple):
    """A partial sum over ``block``: number ``number`` of view rank ``rank``, or of the whole ``host`` where ``rank`` is -1."""

    block: Block
    host: int
    rank: int
    number: int


def hosts_of(places: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The view ranks of each host, in the order of the hosts' first ranks. A rank with an empty place shares no host."""
    found: dict[object, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place or rank, []).append(rank)
    return tuple(map(tuple, found.values()))


def helps(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether two levels send less between hosts: there are several hosts, and several ranks on one of them."""
    return len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)


@dataclass(frozen=True)
class TwoLevel:
    """The plan of a sum in two levels: the additions on each host, and the sums that cross.

    Args:
        hosts: the view ranks of each host.
        leaves: by view rank, the blocks whose sums it brings, from left to right.
        shards: batch shards of the run.
    """

    hosts: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[Block, ...], ...]
    shards: int
    _host_of: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_host_of", {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks})

    def host_of(self, rank: int) -> int:
        return self._host_of[rank]

    def contributed(self, host: int) -> list[Leaf]:
        """All partial sums of a host's ranks, from left to right in the tree."""
        return sorted(Leaf(block, host, rank, number) for rank in self.hosts[host] for number, block in enumerate(self.leaves[rank]))

    def combined(self, host: int) -> tuple[Additions, list[int]]:
        """(additions of :meth:`contributed` by index, indices of the sums that cross)."""
        return join([leaf.block for leaf in self.contributed(host)], self.shards)

    def crossing(self, host: int) -> list[Leaf]:
        """The sums of a host that cross to each owner elsewhere."""
        found, (additions, at) = self.contributed(host), self.combined(host)
        stop = {index: found[index].block[1] for index in range(len(found))}
        for left, right in additions:
            stop[left] = stop[right]
        return [Leaf((found[index].block[0], stop[index]), host, -1, number) for number, index in enumerate(at)]

    def owned(self, host: int) -> list[Leaf]:
        """The sums that an owner on ``host`` adds up, from left to right: those of its host's ranks, and those that cross to it."""
        others = (leaf for other in range(len(self.hosts)) if other != host for leaf in self.crossing(other))
        return sorted([*self.contributed(host), *others])

    def parts(self, host: int, owner: int) -> list[ChunkPart]:
        """By rank of ``host``, its part of the work on the chunk of ``owner``, which is elsewhere. All get equal work, in few parts."""
        ranks = self.hosts[host]
        size, elsewhere = len(ranks), len(self.leaves) - len(ranks)
        start = (owner - bisect.bisect_left(ranks, owner)) * size
        stop = start + size
        found = []
        for index in range(start // elsewhere, (stop - 1) // elsewhere + 1):
            lo, hi = max(start, index * elsewhere), min(stop, (index + 1) * elsewhere)
            found.append(ChunkPart(owner, ranks[index], lo - start, hi - start, size))
        return found

    def all_parts(self, host: int) -> Iterator[ChunkPart]:
        """The parts of all chunks that are owned elsewhere."""
        for owner in range(len(self.leaves)):
            if self._host_of[owner] != host:
                yield from self.parts(host, owner)
