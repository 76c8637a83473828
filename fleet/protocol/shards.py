"""The fixed binary tree over batch shards: it is the order in which gradients are summed, at any world size.

The tree over ``lo..hi`` splits at ``lo`` plus the largest power of two below ``hi - lo``. A *block* is a node of this tree, as a half-open
range. Two neighbouring blocks may be added exactly when their union is a block too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fleet.protocol.probes import probe

Block = tuple[int, int]
Additions = list[tuple[int, int]]
"""Pairs (left, right) of indices of partial sums, in the order in which they are added; each sum takes the left one's place."""


def middle(lo: int, hi: int) -> int:
    """Where the tree splits ``lo..hi``; needs ``hi - lo >= 2``."""
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def _walk(lo: int, hi: int) -> Iterator[Block]:
    yield (lo, hi)
    if hi - lo > 1:
        yield from _walk(lo, middle(lo, hi))
        yield from _walk(middle(lo, hi), hi)


@functools.lru_cache(maxsize=16)
def tree(shards: int) -> frozenset[Block]:
    """All ``2 * shards - 1`` blocks of the tree over ``0..shards``."""
    return frozenset(_walk(0, shards))


@functools.lru_cache(maxsize=65536)
def blocks(start: int, stop: int, shards: int) -> tuple[Block, ...]:
    """The fewest blocks that tile ``start..stop``, from left to right; at most ``2 * log2(shards)`` of them."""
    found: list[Block] = []
    pending = [(0, shards)]
    while pending:
        lo, hi = pending.pop()
        if start <= lo and hi <= stop:
            found.append((lo, hi))
        elif lo < stop and start < hi:
            pending += [(middle(lo, hi), hi), (lo, middle(lo, hi))]
    return tuple(found)


def cover(held: Collection[int], shards: int) -> tuple[Block, ...]:
    """The fewest blocks that hold exactly the shards ``held``, from left to right: the sums that are left once siblings are added up."""
    found: list[Block] = []
    pending = [(0, shards)] if held else []
    while pending:
        lo, hi = pending.pop()
        inside = sum(shard in held for shard in range(lo, hi))
        if inside == hi - lo:
            found.append((lo, hi))
        elif inside:
            pending += [(middle(lo, hi), hi), (lo, middle(lo, hi))]
    return tuple(found)


def join(leaves: Sequence[Block], shards: int) -> tuple[Additions, list[int]]:
    """Plan to add up the partial sums of ``leaves``, which are sorted, up the tree as far as they are neighbours.

    Returns the additions, and the indices of the sums that are left.
    """
    nodes, plan = tree(shards), Additions()
    stack: list[tuple[Block, int]] = []
    for index, leaf in enumerate(leaves):
        stack.append((leaf, index))
        while len(stack) > 1 and stack[-2][0][1] == stack[-1][0][0] and (stack[-2][0][0], stack[-1][0][1]) in nodes:
            (right, addend), (left, into) = stack.pop(), stack.pop()
            plan.append((into, addend))
            stack.append(((left[0], right[1]), into))
    return plan, [index for _, index in stack]


class Shares(NamedTuple):
    """By view rank: ``kept`` blocks whose sums it brings into the step, and ``assigned`` shards that it still has to compute."""

    kept: tuple[tuple[Block, ...], ...]
    assigned: tuple[tuple[int, ...], ...]

    def leaves(self, shards: int) -> list[tuple[Block, ...]]:
        """By view rank: its blocks once it has computed its assigned shards."""
        return [
            cover({shard for lo, hi in kept for shard in range(lo, hi)} | set(assigned), shards)
            for kept, assigned in zip(self.kept, self.assigned, strict=True)
        ]

    def contributed(self, shards: int) -> list[list[int]]:
        """By view rank: the shards of its :meth:`leaves`."""
        return [[shard for block in blocks for shard in range(*block)] for blocks in self.leaves(shards)]


def share(
    held: Sequence[Collection[int]], ranges: Sequence[tuple[int, int]], shards: int, idle: Collection[int] = (), giver: int = -1
) -> Shares:
    """The ranks' shares of a step with some computed shards. Each shard counts once, and every rank with a range has at least one.

    Args:
        held: by view rank, the shards whose gradients it holds, summed up by :func:`cover`. A sum cannot be split again.
        ranges: by view rank, the shards that it computes when no rank holds any.
        idle: view ranks that bring no shards, and hold none.
        giver: a view rank that gives its state away meanwhile, or -1. Surplus shards go to the other ranks first.
    """
    if idle:
        return _among_the_others(held, ranges, shards, idle, giver)
    if not any(held):
        return Shares(((),) * len(ranges), tuple(tuple(range(lo, hi)) for lo, hi in ranges))
    kept: list[list[Block]] = []
    missing = set(range(shards))
    for shards_of_one in held:
        if not missing.issuperset(shards_of_one):
            probe("two ranks bring the same shard")
        kept.append([block for block in cover(shards_of_one, shards) if missing.issuperset(range(*block))])
        missing.difference_update(*(range(*block) for block in kept[-1]))
    while len(missing) < sum(not blocks_of_one and lo < hi for blocks_of_one, (lo, hi) in zip(kept, ranges, strict=True)):
        probe("a rank gives up a sum so that another has a shard")
        missing.update(range(*_smallest_to_spare(kept)))
    loads = [sum(hi - lo for lo, hi in one) for one in kept]
    return Shares(tuple(map(tuple, kept)), tuple(_assign(sorted(missing), loads, giver)))


def _among_the_others(
    held: Sequence[Collection[int]], ranges: Sequence[tuple[int, int]], shards: int, idle: Collection[int], giver: int
) -> Shares:
    """As :func:`share`, among the ranks that are not ``idle``. They divide the shards in the proportions of their own ranges."""
    busy = [rank for rank in range(len(ranges)) if rank not in idle]
    total = sum(ranges[rank][1] - ranges[rank][0] for rank in busy)
    ends = list(itertools.accumulate((ranges[rank][1] - ranges[rank][0] for rank in busy), initial=0))
    cuts = [end * shards // total for end in ends]
    place = {rank: number for number, rank in enumerate(busy)}
    found = share([held[rank] for rank in busy], list(itertools.pairwise(cuts)), shards, giver=place.get(giver, -1))
    kept = tuple(found.kept[place[rank]] if rank in place else () for rank in range(len(ranges)))
    return Shares(kept, tuple(found.assigned[place[rank]] if rank in place else () for rank in range(len(ranges))))


def _smallest_to_spare(kept: list[list[Block]]) -> Block:
    """Take away a block: the smallest of a rank with several blocks, else the smallest block of several shards.

    Such a block exists while ranks <= shards.
    """
    spare = ((len(one) == 1, hi - lo, rank, (lo, hi)) for rank, one in enumerate(kept) for lo, hi in one if len(one) > 1 or hi - lo > 1)
    _, _, rank, block = min(spare)
    kept[rank].remove(block)
    return block


def _assign(missing: Sequence[int], load: Sequence[int], giver: int) -> list[tuple[int, ...]]:
    """Assign the missing shards evenly, in runs of neighbours. Surplus shards go to the ranks that hold least, and to the giver last."""
    each, over = divmod(len(missing), len(load))
    favoured = set(sorted(range(len(load)), key=lambda rank: (load[rank], rank == giver, rank))[:over])
    ends = list(itertools.accumulate((each + (rank in favoured) for rank in range(len(load))), initial=0))
    return [tuple(missing[start:stop]) for start, stop in itertools.pairwise(ends)]
