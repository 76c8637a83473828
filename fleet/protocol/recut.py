"""How chunks of a sharded state come to new places beside the running steps. Pure: live and simulated ranks use it.

A view that begins with a loss goes on with the cut that is there (:func:`fleet.protocol.chunks.inherited`): no chunk moves before its first
step is committed. From then on each step brings a few *slices* of the chunks that a rank is to keep. A slice is taken from the committed
state while the next step is computed, and that step's gradients go to its new place, too. So what is in place is stepped like a copy. When
all slices are in place, all ranks turn to the new cut behind the same step, and nothing moves any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from fleet.protocol.chunks import Chunk, Claim, StateCut, Stretch, bounds, choose
from fleet.protocol.domains import Place
from fleet.protocol.probes import probe

SLICES = 64
"""Each chunk that a rank is to keep comes in so many slices."""
LEAST_STEP_S = 0.1
"""Seconds. A step counts as so long at least, also where no rank knows how long its steps are."""
FIRST_BYTES_PER_S, ELEMENT_BYTES = 1.25e8, 16
"""Beside the first step no rank receives more than 1 Gbit/s carry in the step, unless a single slice has more. An element counts with its
optimizer's state. Beside each later step come twice as many, while slices come in time."""


def first_elements(claims: Sequence[Claim]) -> int:
    """How many elements may come to one rank beside the first step; at least one."""
    paces = [claim.pace_s for claim in claims if claim.pace_s]
    return max(1, int(max(LEAST_STEP_S, min(paces, default=LEAST_STEP_S)) * FIRST_BYTES_PER_S / ELEMENT_BYTES))


class Recut:
    """The way from the cut ``now`` to the cut ``wanted``. All ranks of a view do the same with theirs.

    For each step: :meth:`begin` behind a commit, :meth:`end` once all slices that are under way have come. Of each chunk those slices come
    first of which the fewest ranks hold a copy.

    Args:
        ranks: of the view.
        extents: lengths of the flat buffers.
        places: by view rank, its place, see :func:`fleet.protocol.chunks.guards`; (): all are equally near.
        slices: see :data:`SLICES`. ``first``: see :func:`first_elements`.

    Attributes:
        done: so many slices of each wanted chunk are in place. ``coming``: so many more are under way.
    """

    def __init__(
        self,
        now: StateCut,
        wanted: StateCut,
        ranks: int,
        extents: Sequence[int],
        places: Sequence[Place] = (),
        *,
        first: int,
        slices: int = SLICES,
    ) -> None:
        self.now, self.wanted, self.slices = now, wanted, slices
        self.done = self.coming = 0
        self._extents, self._places = extents, places
        self._starts = [[bounds(extent, (now.size, index))[0] for index in range(now.size)] for extent in extents]
        self._kept = [wanted.kept(rank) for rank in range(ranks)]
        self._order = [self._by_copies(index) for index in range(wanted.size)]
        most = max(sum(hi - lo for _, (lo, hi, _) in self._stretches(rank, 0, slices)) for rank in range(ranks))
        self._batch = max(1, slices * first // most) if most else slices

    def _by_copies(self, index: int) -> list[int]:
        """The slices of a wanted chunk, in the order in which they come."""
        count = self.wanted.size * self.slices
        copies = [min(len(self.now.keepers[each]) for each in self._below(count, index * self.slices + one)) for one in range(self.slices)]
        return sorted(range(self.slices), key=copies.__getitem__)

    def _below(self, size: int, index: int) -> range:
        """The chunks of ``now`` that share elements with chunk ``(size, index)``."""
        return range(index * self.now.size // size, -(-(index + 1) * self.now.size // size))

    @property
    def over(self) -> bool:
        """All slices are in place: the cut ``wanted`` can take the place of ``now``."""
        return self.done == self.slices

    def begin(self) -> bool:
        """The next slices leave the ranks that hold them. False: there are none."""
        assert not self.coming, "slices are under way"
        self.coming = min(self._batch, self.slices - self.done)
        return bool(self.coming)

    def end(self, *, late: bool) -> None:
        """All slices that were under way are in place. ``late``: some rank has waited for them, so the next ones are fewer."""
        if late:
            probe("slices of a chunk come later than the step")
        self.done, self.coming = self.done + self.coming, 0
        self._batch = max(1, self._batch // 2) if late else 2 * self._batch

    def under_way(self, rank: int, source: int | None = None) -> list[tuple[int, Stretch]]:
        """(flat buffer, stretch with its source) of all that comes to view rank ``rank`` now. ``source``: from this rank alone."""
        return self._stretches(rank, self.done, self.done + self.coming, source)

    def in_place(self, rank: int, source: int | None = None) -> list[tuple[int, Stretch]]:
        """(flat buffer, stretch with a source of its gradients) of all that view rank ``rank`` has beside its chunks of ``now``."""
        return self._stretches(rank, 0, self.done, source)

    def claimed(self, rank: int) -> tuple[Chunk, ...]:
        """The slices that are in place on view rank ``rank``, as chunks; its chunks of ``wanted`` once all are."""
        if self.done == self.slices:
            return self._kept[rank]
        count, order = self.slices, self._order
        there = [(size, index, one) for size, index in self._kept[rank] for one in sorted(order[index][: self.done])]
        return tuple((size * count, index * count + one) for size, index, one in there)

    def _stretches(self, rank: int, first: int, last: int, source: int | None = None) -> list[tuple[int, Stretch]]:
        """The stretches of the slices ``first..last`` in order that ``rank`` lacks in ``now``. In one chunk of ``now`` all have one
        source."""
        found: list[tuple[int, Stretch]] = []
        for size, index in self._kept[rank] if first < last else ():
            below = self._below(size, index)
            if source is not None and not any(source in self.now.keepers[each] for each in below):
                continue
            for lo, hi in _runs(sorted(self._order[index][first:last])):
                run = (size * self.slices, index * self.slices + lo), (size * self.slices, index * self.slices + hi)
                for flat, extent in enumerate(self._extents):
                    found += [(flat, one) for one in self._of_run(rank, flat, bounds(extent, run[0])[0], bounds(extent, run[1])[1])]
        return [one for one in found if source is None or one[1].source == source]

    def _of_run(self, rank: int, flat: int, lo: int, hi: int) -> Iterator[Stretch]:
        """The stretches of ``lo..hi`` of a flat buffer that ``rank`` lacks, one for each chunk of ``now``."""
        extent, size = self._extents[flat], self.now.size
        for number in range(max(0, bisect_right(self._starts[flat], lo) - 1), size):
            start, stop = bounds(extent, (size, number))
            if start >= hi:
                return
            keepers = self.now.keepers[number]
            if rank not in keepers and max(lo, start) < min(hi, stop):
                yield Stretch(max(lo, start), min(hi, stop), choose(keepers, rank, number, self._places))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of successive numbers, which are in order."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
