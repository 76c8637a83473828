"""Sums in two levels: the ranks of a host add up first what lies together in the tree, then one of each crosses to another host. Pure.

Every rank owns one chunk of what is summed. What a host has of a chunk that is owned elsewhere is combined on that host. Only blocks that
are neighbours in the fixed tree of :mod:`fleet.protocol.shards` are added, so that the order of the sum depends on shards alone. What is
left, one block or the few that the tree leaves, crosses to the owner. The sum crosses back once, and is passed on within the host. A *host*
is whatever ranks say they share: see :func:`fleet.protocol.domains.site_of`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fleet.protocol.shards import Additions, Block, join


class ChunkPart(NamedTuple):
    """Of the chunk of ``owner``, cut into ``of`` equal parts: those from ``lo`` to ``hi``, which ``combiner`` adds up for its host."""

    owner: int
    combiner: int
    lo: int
    hi: int
    of: int


class Leaf(NamedTuple):
    """A partial sum that is added up: of view rank ``rank`` the one of that ``number``, or, where that is -1, of a whole ``host``."""

    block: Block
    host: int
    rank: int
    number: int


def hosts_of(places: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The view ranks of each host, in the order of their first ones. A rank that says nothing shares no host."""
    found: dict[object, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place or rank, []).append(rank)
    return tuple(map(tuple, found.values()))


def helps(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether two levels send less between hosts: there are several hosts, and several ranks on one of them."""
    return len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)


@dataclass(frozen=True)
class TwoLevel:
    """Who combines what, and what crosses.

    Args:
        hosts: the view ranks of each host.
        leaves: by view rank, the blocks whose sums it brings, from left to right.
        shards: of the run.
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
        """All that the ranks of a host have, from left to right in the tree."""
        return sorted(Leaf(block, host, rank, number) for rank in self.hosts[host] for number, block in enumerate(self.leaves[rank]))

    def combined(self, host: int) -> tuple[Additions, list[int]]:
        """(what is added to what of :meth:`contributed`, where the sums are then that cross), by index."""
        return join([leaf.block for leaf in self.contributed(host)], self.shards)

    def crossing(self, host: int) -> list[Leaf]:
        """What of a host crosses to each owner elsewhere."""
        found, (additions, at) = self.contributed(host), self.combined(host)
        stop = {index: found[index].block[1] for index in range(len(found))}
        for left, right in additions:
            stop[left] = stop[right]
        return [Leaf((found[index].block[0], stop[index]), host, -1, number) for number, index in enumerate(at)]

    def owned(self, host: int) -> list[Leaf]:
        """What an owner on ``host`` adds up: what its neighbours have each, and what crosses from other hosts; from left to right."""
        others = (leaf for other in range(len(self.hosts)) if other != host for leaf in self.crossing(other))
        return sorted([*self.contributed(host), *others])

    def parts(self, host: int, owner: int) -> list[ChunkPart]:
        """Who on ``host`` combines what of the chunk of ``owner``, who is elsewhere: all members have as much in all, and few parts."""
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
        """Of all chunks that are owned elsewhere."""
        for owner in range(len(self.leaves)):
            if self._host_of[owner] != host:
                yield from self.parts(host, owner)
