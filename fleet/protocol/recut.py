"""How chunks of a sharded state come to new places beside the running steps. Pure: live and simulated ranks use it.

A view that begins with a loss goes on with the cut that is there (:func:`fleet.protocol.chunks.inherited`): no chunk moves before its first
step is committed. From then on each step brings a few *slices* of the chunks that a rank is to keep. A slice is taken from the committed
state while the next step is computed, and that step's gradients go to its new place, too. So what is in place is stepped like a copy. When
all slices are in place, all ranks turn to the new cut behind the same step, and nothing moves any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from fleet.protocol.chunks import Chunk, StateCut, Stretch, bounds, choose
from fleet.protocol.domains import Place
from fleet.protocol.probes import probe

SLICES = 64
"""Each chunk that a rank is to keep comes in so many slices."""
FIRST_ELEMENTS = 1 << 20
"""No rank receives more elements beside the first step, unless a single slice has more. The next steps bring twice as many each, while they
come in time."""


class Recut:
    """The way from the cut ``now`` to the cut ``wanted``. All ranks of a view do the same with theirs.

    For each step: :meth:`begin` behind a commit, :meth:`end` once all slices that are under way have come.

    Args:
        ranks: of the view.
        extents: lengths of the flat buffers.
        places: by view rank, its place, see :func:`fleet.protocol.chunks.guards`; (): all are equally near.
        slices, first: see :data:`SLICES` and :data:`FIRST_ELEMENTS`.

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
        slices: int = SLICES,
        first: int = FIRST_ELEMENTS,
    ) -> None:
        self.now, self.wanted, self.slices = now, wanted, slices
        self.done = self.coming = 0
        self._extents, self._places = extents, places
        self._starts = [[bounds(extent, (now.size, index))[0] for index in range(now.size)] for extent in extents]
        self._kept = [wanted.kept(rank) for rank in range(ranks)]
        most = max(sum(hi - lo for _, (lo, hi, _) in self._stretches(rank, 0, slices)) for rank in range(ranks))
        self._batch = max(1, slices * first // most) if most else slices

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

    def under_way(self, rank: int) -> list[tuple[int, Stretch]]:
        """(flat buffer, stretch with its source) of all that comes to view rank ``rank`` now."""
        return self._stretches(rank, self.done, self.done + self.coming)

    def in_place(self, rank: int) -> list[tuple[int, Stretch]]:
        """(flat buffer, stretch with a source of its gradients) of all that view rank ``rank`` has beside its chunks of ``now``."""
        return self._stretches(rank, 0, self.done)

    def claimed(self, rank: int) -> tuple[Chunk, ...]:
        """The slices that are in place on view rank ``rank``, as chunks."""
        count = self.slices
        return tuple((size * count, index * count + number) for size, index in self._kept[rank] for number in range(self.done))

    def _stretches(self, rank: int, first: int, last: int) -> list[tuple[int, Stretch]]:
        """The stretches of slices ``first..last`` that ``rank`` lacks in ``now``. In one chunk of ``now`` all have one source."""
        found: list[tuple[int, Stretch]] = []
        if first == last:
            return found
        for flat, (extent, starts) in enumerate(zip(self._extents, self._starts, strict=True)):
            for size, index in self._kept[rank]:
                lo = bounds(extent, (size * self.slices, index * self.slices + first))[0]
                hi = bounds(extent, (size * self.slices, index * self.slices + last - 1))[1]
                for number in range(max(0, bisect_right(starts, lo) - 1), self.now.size):
                    start, stop = bounds(extent, (self.now.size, number))
                    if start >= hi:
                        break
                    keepers = self.now.keepers[number]
                    if rank not in keepers and max(lo, start) < min(hi, stop):
                        source = choose(keepers, rank, number, self._places)
                        found.append((flat, Stretch(max(lo, start), min(hi, stop), source)))
        return found
