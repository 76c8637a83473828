"""When the gradients of a shard come, predicted from the shards before; and which buckets of the exchange they complete."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from actors.rank.step.reduction import Chunk

SEEN = 2
"""After so many shards the rank assumes that each gradient comes once in a shard."""


class Habits:
    """How the gradients of a model's parameters, by number, come in the shards that this rank computes.

    A loop body may call backward several times for a shard, and each call adds to a gradient. Then no gradient is sent early.

    Attributes:
        off: why no gradient is sent early for the rest of the run; empty while gradients may be.
    """

    def __init__(self, parameters: int) -> None:
        self._came, self._ever, self._seen = [0] * parameters, [False] * parameters, 0
        self.off = ""

    @property
    def known(self) -> bool:
        """Whether the rank assumes that a gradient no longer changes in a shard once it has come."""
        return not self.off and self._seen >= SEEN

    @property
    def expected(self) -> frozenset[int]:
        """The parameters that have had a gradient."""
        return frozenset(number for number, ever in enumerate(self._ever) if ever)

    def begin(self) -> None:
        """A shard begins."""
        self._came = [0] * len(self._came)

    def came(self, parameter: int) -> None:
        """A backward has left a gradient for ``parameter``, or has added to it."""
        self._came[parameter] += 1

    def end(self) -> None:
        """The shard is over."""
        self._ever = [ever or times > 0 for ever, times in zip(self._ever, self._came, strict=True)]
        self._seen += 1
        if max(self._came, default=0) > 1:
            self.off = "a gradient grows several times in a shard"


class Portion(NamedTuple):
    """The gradients that complete one more bucket: ``parameters``, by number, and their places. Each parameter is in one portion."""

    parameters: tuple[int, ...]
    spans: tuple[Chunk, ...]


class BucketOrder:
    """Which parameters complete which bucket, in the order in which buckets travel.

    Args:
        buckets: the places of each bucket in the flat buffers.
        places: by parameter, (flat buffer, element) at which its gradient begins.
        extents: by flat buffer, how many of its elements are gradients; all gradients are in a bucket.

    Attributes:
        needs: by bucket, the parameters that have a part in it. ``needed_by``: by parameter, the buckets.
        portions: of each bucket.
    """

    def __init__(self, buckets: Sequence[Sequence[Chunk]], places: Sequence[tuple[int, int]], extents: Sequence[int]) -> None:
        starts = [sorted((start, number) for number, (flat, start) in enumerate(places) if flat == which) for which in range(len(extents))]
        ends = [[start for start, _ in some[1:]] + [extent] for some, extent in zip(starts, extents, strict=True)]
        self.needs: list[frozenset[int]] = []
        self.portions: list[Portion] = []
        left = set(range(len(places)))
        for bucket in buckets:
            touched = [(flat, *_within(starts[flat], lo, hi)) for flat, lo, hi in bucket if lo < min(hi, extents[flat])]
            self.needs.append(frozenset(starts[flat][at][1] for flat, first, last in touched for at in range(first, last)))
            new = sorted({(flat, at) for flat, first, last in touched for at in range(first, last) if starts[flat][at][1] in left})
            numbers = tuple(starts[flat][at][1] for flat, at in new)
            left.difference_update(numbers)
            self.portions.append(Portion(numbers, _joined([Chunk(flat, starts[flat][at][0], ends[flat][at]) for flat, at in new])))
        if left and self.portions:  # parameters without elements
            self.portions[-1] = Portion((*self.portions[-1].parameters, *sorted(left)), self.portions[-1].spans)
        self.needed_by = [[number for number, need in enumerate(self.needs) if one in need] for one in range(len(places))]


def _within(starts: Sequence[tuple[int, int]], lo: int, hi: int) -> tuple[int, int]:
    """Which parameters lie in ``lo..hi``, as a half-open range of places in ``starts``."""
    return max(0, bisect.bisect_right(starts, (lo, math.inf)) - 1), bisect.bisect_left(starts, (hi, -1))


def _joined(spans: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """``spans`` with neighbours joined into one."""
    found: list[Chunk] = []
    for span in spans:
        if found and found[-1].flat == span.flat and found[-1].hi == span.lo:
            span = Chunk(span.flat, found.pop().lo, span.hi)
        found.append(span)
    return tuple(found)


class Countdown:
    """Counts how many buckets of one shard are :attr:`complete`, in their order. ``expected``: parameters whose gradients will come."""

    def __init__(self, order: BucketOrder, expected: Collection[int]) -> None:
        self._order = order
        self._missing = [len(need & frozenset(expected)) for need in order.needs]
        self._pending, self.complete = set(expected), 0
        self._advance()

    def came(self, parameter: int) -> None:
        """The gradient of ``parameter`` is there."""
        if parameter in self._pending:
            self._pending.discard(parameter)
            for bucket in self._order.needed_by[parameter]:
                self._missing[bucket] -= 1
            self._advance()

    def _advance(self) -> None:
        while self.complete < len(self._missing) and not self._missing[self.complete]:
            self.complete += 1
