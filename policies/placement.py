"""The batch shards that each view rank computes.

A step takes as long as its fullest rank, so no rank gets more than ``ceil(shards / ranks)``. The best of those splits has the fewest
*partial sums*: a rank sends one for each block of the shard tree (``fleet.protocol.shards``) in its range. The best split of 16 shards over
3 ranks is 6, 6, 4: two, two and one partial sums. 6, 5, 5 would need two, three and two.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from fleet.errors import ConfigError
from fleet.protocol.domains import Crowd, place_of
from fleet.protocol.shards import blocks

Ranges = tuple[tuple[int, int], ...]
Cost = tuple[int, float]

EXHAUSTIVE_LIMIT = 200_000
"""Largest number of candidate ranges for which all splits are compared. Beyond it each rank takes the best range that is left."""


def ranges(shards: int, ranks: int) -> Ranges:
    """Half-open shard ranges by view rank: contiguous, none empty, tiling ``0..shards``.

    Raises ConfigError when there are more ranks than shards.
    """
    return weighted_ranges(shards, (1.0,) * ranks)


def weighted_ranges(shards: int, weights: Sequence[float]) -> Ranges:
    """As :func:`ranges`, for ranks of unequal speed: view rank ``r`` computes ``weights[r]`` shards while one of weight 1 computes one.

    The slowest rank's time, the largest of shards / weight, is the least of any split into whole shards. Of those splits it takes the one
    with the fewest partial sums, then the evenest load.

    Raises ConfigError when there are more ranks than shards, or a weight is not a positive number.
    """
    if not 1 <= len(weights) <= shards:
        reason = f"each rank needs at least one of the {shards} batch shards"
        raise ConfigError("ranks", len(weights), reason, "Use fewer ranks or more shards.")
    for weight in weights:
        if not 0 < weight < math.inf:
            raise ConfigError("weights", weight, "the speed of a rank must be a positive number", "Leave out a rank that stands still.")
    return _weighted(shards, tuple(weight / max(weights) for weight in weights))


@functools.lru_cache(maxsize=4096)
def _weighted(shards: int, weights: tuple[float, ...]) -> Ranges:
    caps = _caps(shards, weights)
    slack = sum(caps) - shards
    candidates = len(caps) * (slack + 1) * min(max(caps), slack + 1)
    cuts = _exhaustive(shards, caps, weights) if candidates <= EXHAUSTIVE_LIMIT else _greedy(shards, caps, weights)
    return tuple(itertools.pairwise(cuts))


def _caps(shards: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """The most shards that each rank may get in the least time for all shards, at least one each."""
    most = shards - len(weights) + 1

    def caps(time: float) -> tuple[int, ...]:
        return tuple(max(1, min(most, math.floor(time * weight * (1 + 1e-12)))) for weight in weights)

    low, high = 1 / min(weights), most / min(weights)
    if sum(caps(low)) >= shards:
        return caps(low)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if sum(caps(middle)) >= shards else (middle, high)
    return caps(high)


class _Bounds:
    """Bounds of each range's begin and end, so that every rank before and after it gets from 1 shard up to its cap."""

    def __init__(self, shards: int, caps: tuple[int, ...]) -> None:
        self.shards, self.caps = shards, caps
        self.before = [0, *itertools.accumulate(caps)]

    def after(self, rank: int) -> tuple[int, int]:
        """Least and most shards that the ranks after ``rank`` can take."""
        return len(self.caps) - 1 - rank, self.before[-1] - self.before[rank + 1]

    def starts(self, rank: int) -> range:
        least, most = self.after(rank - 1)
        return range(max(rank, self.shards - most), min(self.before[rank], self.shards - least) + 1)

    def stops(self, rank: int, start: int) -> range:
        least, most = self.after(rank)
        return range(max(start + 1, self.shards - most), min(start + self.caps[rank], self.shards - least) + 1)


def _cost(start: int, stop: int, shards: int, weight: float) -> Cost:
    """Partial sums first; then the square of the load, as its sum is least for the evenest split."""
    return len(blocks(start, stop, shards)), (stop - start) ** 2 / weight


def _exhaustive(shards: int, caps: tuple[int, ...], weights: tuple[float, ...]) -> list[int]:
    """Best cut positions, by dynamic programming from the right: ``best[start]`` is for the ranks after the current one."""
    bounds = _Bounds(shards, caps)
    best: dict[int, tuple[Cost, int]] = {shards: ((0, 0.0), shards)}
    choices: list[dict[int, int]] = []
    for rank in reversed(range(len(caps))):
        here: dict[int, tuple[Cost, int]] = {}
        for start in bounds.starts(rank):
            ways = ((_add(_cost(start, stop, shards, weights[rank]), best[stop][0]), -stop) for stop in bounds.stops(rank, start))
            cost, stop = min(ways)
            here[start] = (cost, -stop)
        choices.append({start: stop for start, (_, stop) in here.items()})
        best = here
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return cuts


def _add(one: Cost, other: Cost) -> Cost:
    return one[0] + other[0], one[1] + other[1]


def _greedy(shards: int, caps: tuple[int, ...], weights: tuple[float, ...]) -> list[int]:
    bounds, cuts = _Bounds(shards, caps), [0]
    speeds = [0.0, *itertools.accumulate(reversed(weights))]
    for rank, weight in enumerate(weights):
        start = cuts[-1]
        even = start + (shards - start) * weight / speeds[len(weights) - rank]
        cuts.append(min(bounds.stops(rank, start), key=lambda stop: (len(blocks(start, stop, shards)), abs(stop - even), stop)))
    return cuts


# ---- copies in the memory of other nodes -------------------------------------------------------------------------------------------------


def copies(homes: Sequence[str], domains: Mapping[str, str], copies: int) -> tuple[tuple[str, ...], ...]:
    """Nodes that keep the copies of each view rank: never its own, and fewer than ``copies`` where there are too few nodes.

    The order of choice:

    - Other failure domains, the widest apart first: a domain without a copy before one with a copy. The rank's own comes last among those
      without, as two copies should survive without any rank.
    - The node that keeps least.
    - The next one after the rank's own by name, so that a view of one rank a node becomes a ring.

    Args:
        homes: the node of each view rank.
        domains: the domain path of every node with memory for copies (:mod:`fleet.protocol.domains`); "" when it is not known.
    """
    order, places = sorted(domains), {node: place_of(path) for node, path in domains.items()}
    at, load = {node: index for index, node in enumerate(order)}, dict.fromkeys(order, 0)
    chosen: list[tuple[str, ...]] = []
    for home in homes:
        mine, start = list[str](), bisect.bisect_left(order, home)
        crowd = Crowd([places.get(home, ())])
        for _ in range(min(copies, len(order) - (home in domains))):
            free = (node for node in order if node != home and node not in mine)
            node = min(free, key=lambda node: (crowd.of(places[node]), load[node], (at[node] - start) % len(order)))
            crowd.add(places[node], 2)
            load[node] += 1
            mine.append(node)
        chosen.append(tuple(mine))
    return tuple(chosen)
