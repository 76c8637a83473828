"""The fixed binary tree over batch shards: the one order in which gradients are summed, at any world size.

The tree over ``lo..hi`` splits at ``lo`` plus the largest power of two below ``hi - lo``. A *block* is a node of this tree, as a half-open
range. Two blocks that lie side by side may be added exactly when their union is a block too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

Block = tuple[int, int]


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
