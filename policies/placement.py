"""Which batch shards each view rank computes.

A step takes as long as its fullest rank, so no rank gets more than ``ceil(shards / ranks)``. Among those splits the best has the fewest
*partial sums*: a rank sends one for each block of the shard tree (``fleet.shards``) that its range is made of. 16 shards over 3 ranks are
cut 6, 6, 4: two, two and one partial sums; 6, 5, 5 would need two, three and two.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

from fleet.errors import ConfigError
from fleet.shards import blocks

Ranges = tuple[tuple[int, int], ...]
Cost = tuple[int, int]

EXHAUSTIVE_LIMIT = 200_000
"""Largest number of candidate ranges for which all splits are compared; beyond it each rank takes the best range that is left."""


def ranges(shards: int, ranks: int) -> Ranges:
    """Half-open shard ranges by view rank: contiguous, none empty, tiling ``0..shards``.

    Raises ConfigError when there are more ranks than shards.
    """
    if not 1 <= ranks <= shards:
        raise ConfigError("ranks", ranks, f"each rank needs at least one of the {shards} batch shards", "Use fewer ranks or more shards.")
    return _ranges(shards, ranks)


@functools.lru_cache(maxsize=4096)
def _ranges(shards: int, ranks: int) -> Ranges:
    largest = -(-shards // ranks)
    slack = ranks * largest - shards
    candidates = ranks * (slack + 1) * min(largest, slack + 1)
    cuts = _exhaustive(shards, ranks, largest) if candidates <= EXHAUSTIVE_LIMIT else _greedy(shards, ranks, largest)
    return tuple(itertools.pairwise(cuts))


def _stops(start: int, left: int, shards: int, largest: int) -> Iterable[int]:
    """Where a range from ``start`` may end when ``left`` ranks come after it: each of them needs 1 to ``largest`` shards."""
    return range(max(start + 1, shards - left * largest), min(start + largest, shards - left) + 1)


def _cost(start: int, stop: int, shards: int) -> Cost:
    """Partial sums first; then the square of the size, as its sum is least for the evenest split."""
    return len(blocks(start, stop, shards)), (stop - start) ** 2


def _exhaustive(shards: int, ranks: int, largest: int) -> list[int]:
    """Best cut positions, by dynamic programming from the right: ``best[start]`` is for the ranks after the one at hand."""
    best: dict[int, tuple[Cost, int]] = {shards: ((0, 0), shards)}
    choices: list[dict[int, int]] = []
    for left in range(ranks):
        here: dict[int, tuple[Cost, int]] = {}
        ahead = ranks - 1 - left
        for start in range(max(ahead, shards - (left + 1) * largest), min(ahead * largest, shards - left - 1) + 1):
            cost, stop = min((_add(_cost(start, stop, shards), best[stop][0]), -stop) for stop in _stops(start, left, shards, largest))
            here[start] = (cost, -stop)
        choices.append({start: stop for start, (_, stop) in here.items()})
        best = here
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return cuts


def _add(one: Cost, other: Cost) -> Cost:
    return one[0] + other[0], one[1] + other[1]


def _greedy(shards: int, ranks: int, largest: int) -> list[int]:
    cuts = [0]
    for left in reversed(range(ranks)):
        start = cuts[-1]
        even = start + (shards - start) / (left + 1)
        cuts.append(min(_stops(start, left, shards, largest), key=lambda stop: (len(blocks(start, stop, shards)), abs(stop - even), stop)))
    return cuts
