"""A step with sharded optimizer state (``optimizer_sharding = "zero1"``).

Each rank sums one chunk of the gradient, steps that chunk of the parameters, and sends it to all. A few other ranks, its *guards*, get the
sum too. They take the same step on their copy of the chunk's state, so the copy has the same bits. No state is sent without a fault. Steps
commit in two phases:

1. Sums go to owners and guards, and each rank reports to all that it has its sums (:mod:`fleet.protocol.vote`). Before that no rank changes
   its state: when a rank is lost, all others are at the step's beginning.
2. Each rank steps its own chunks. When a rank is lost now, ranks that have not yet taken the step take it from their sums
   (:mod:`actors.rank.zero1.kept`). So all ranks have taken the step, and only the parameters have to be sent again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from actors.rank.membership.process_group import Group
from actors.rank.state.saving import Share
from actors.rank.step.layout import LayoutInputs, OwnWord, StateLayout
from actors.rank.step.reduction import Bucket, Chunk, Reducer
from actors.rank.tags import Tag
from actors.rank.zero1.chunked import OptimizerChunks, check_tracked
from actors.rank.zero1.kept import FIXED, KeptChunks
from fleet.protocol.chunks import UNCUT, WHOLE, StateCut, Stretch, bounds, cut_points, route
from fleet.protocol.chunks import Chunk as ChunkOfState
from fleet.protocol.records import COMM
from fleet.protocol.types import StateId

Routes = list[list[list[Stretch]]]
"""By view rank and flat buffer: the stretches that the rank needs, each with its source."""


class _StretchBucket(Bucket):
    """One stretch of one chunk of each rank, of one flat buffer.

    Attributes:
        keepers: by rank, the keepers of its chunk, the owner first; none of a rank that owns fewer chunks than others.
    """

    def __init__(self, flat: int, spans: Sequence[tuple[int, int]], keepers: Sequence[tuple[int, ...]]) -> None:
        super().__init__(flat, 0, 0, 1)
        self._spans, self.keepers = spans, keepers

    def place(self, rank: int) -> Chunk:
        return Chunk(self.flat, *self._spans[rank])


class ShardedReducer(Reducer):
    """Sums of gradients go to the owner of their chunk and its guards; the rest of a flat buffer goes to all ranks.

    Attributes:
        cut: which ranks of the view keep which chunk.
        extents: by flat buffer, how many of its elements are gradients.
    """

    cut = UNCUT
    extents: Sequence[int] = ()

    def _swaps(self, flats: Sequence[torch.Tensor]) -> bool:
        return False  # a rank must not get the sums of all chunks

    def _buckets(self, flats: Sequence[torch.Tensor], size: int) -> list[Bucket]:
        """Buckets with a stretch of one chunk of each rank; the last stretches come first."""
        found: list[tuple[float, int, Bucket]] = []
        owned = [self.cut.owned(rank) for rank in range(size)]
        for flat, extent in enumerate(self.extents):
            for turn in range(max(map(len, owned))):
                found += self._of_chunks(flat, flats[flat], [chunks[turn] if turn < len(chunks) else None for chunks in owned])
            rest = flats[flat].numel()
            count = -(-(rest - extent) * flats[flat].element_size() // self._bucket_bytes)
            cut_rest = cut_points(extent, rest, count) if count else []
            found += [(0.0, flat, Bucket(flat, lo, hi, size)) for lo, hi in itertools.pairwise(cut_rest)]
        return [bucket for _, _, bucket in sorted(found, key=lambda one: one[:2], reverse=True)]

    def _of_chunks(self, flat: int, whole: torch.Tensor, chunks: Sequence[ChunkOfState | None]) -> list[tuple[float, int, Bucket]]:
        """The buckets of one flat buffer, each with a stretch of each rank's chunk of ``chunks``; with their place in the order."""
        spans = [bounds(self.extents[flat], chunk) if chunk is not None else (0, 0) for chunk in chunks]
        keepers = [self.cut.keepers[chunk[1]] if chunk is not None else () for chunk in chunks]
        longest = max(hi - lo for lo, hi in spans) * whole.element_size()
        count = -(-longest * len(chunks) // self._most_bytes(whole))
        cut = [cut_points(lo, hi, count) for lo, hi in spans] if count else []
        return [((i + 1) / count, flat, _StretchBucket(flat, [(cuts[i], cuts[i + 1]) for cuts in cut], keepers)) for i in range(count)]

    def _comes_back(self, bucket: Bucket) -> bool:
        return not isinstance(bucket, _StretchBucket)

    def _contributions(self, bucket: Bucket, mine: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        if not isinstance(bucket, _StretchBucket):
            return super()._contributions(bucket, mine)
        assert self._group is not None
        return [(mine, guard) for guard in bucket.keepers[self._group.rank][1:]]

    def _returns(self, bucket: Bucket, out: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        if not isinstance(bucket, _StretchBucket):
            return super()._returns(bucket, out)
        assert self._group is not None
        owners = [owner for owner, keepers in enumerate(bucket.keepers) if self._group.rank in keepers[1:]]
        return [(bucket.chunk(out, owner), owner) for owner in owners]


def cut_gradients(layout: StateLayout) -> None:
    """The layout's reducer sums all gradients that do not leave a rank in the backward."""
    reducer, gradients = layout.reducer, layout.gradients
    assert isinstance(reducer, ShardedReducer)
    reducer.extents = [0 if flat in gradients.layout.leaving else extent for flat, extent in enumerate(gradients.layout.extents)]


class Zero1Layout(StateLayout):
    """The optimizer's state is spread over the ranks of the view; all have the parameters whole. See the module."""

    kept: KeptChunks
    reducer: ShardedReducer
    fixed, sums = FIXED, ShardedReducer
    spares_newcomers = False
    """Chunks move before the step, and all ranks wait for them."""

    def __init__(self, given: LayoutInputs) -> None:
        check_tracked(given.state, given.settings.threads_per_rank)
        super().__init__(given)
        cut_gradients(self)
        gradients = self.gradients
        chunks = OptimizerChunks(given.update.optimizers, gradients.parameters, gradients.layout.places, gradients.layout.extents)
        self.kept = KeptChunks(given, gradients, chunks)
        self._routes: Routes = []

    def begin(self, state: StateId) -> None:
        """See :class:`StateLayout`, here and below."""
        self.kept.begin(state)

    def reset(self) -> None:
        self.kept.sums.forget()

    def hold(self) -> None:
        self.kept.sums.hold()

    def word(self) -> OwnWord:
        return self.kept.word(self.group)

    def settle(self, divisor: float, *, late: bool) -> None:
        self.kept.arrive(lambda flat, lo, hi: self.gradients.mean.flats[flat][lo:hi], late=late)

    @contextlib.contextmanager
    def stepping(self, *, turns: bool) -> Iterator[list[torch.Tensor]]:
        """The parameters are complete once they are published."""
        with self.kept.stepping(complete=self.group.size == 1) as gradients:
            yield gradients
        if turns and self.kept.turn(self.group.rank) is not None:
            self._route(self.group.size)

    def publish(self, then: Callable[[], None]) -> None:
        self.kept.afterwards(then)
        if not self.kept.complete:
            with self.given.recorder.during(COMM):
                self.gather(self.group, self._routes)
        self.kept.conclude()

    def digest(self, step: int) -> str:
        return self.kept.digest(self.group, step)

    def share(self) -> Share:
        return self.kept.share(self.state_part)

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def place(self, state: StateId, cut: StateCut, group: Group, asked: Sequence[tuple[int, ...]], *, inherited: bool) -> None:
        self.kept.place(state, cut, group.rank)
        self._route(group.size)

    def _route(self, size: int) -> None:
        """The ``size`` ranks of the view keep the chunks of another cut."""
        cut = self.reducer.cut = self.kept.cut
        held = [cut.kept(rank) for rank in range(size)]
        self._routes = [[route(held, [WHOLE], extent, rank) for extent in self.kept.chunks.extents] for rank in range(size)]

    def gather(self, group: Group, routes: Routes) -> None:
        """Send the stretches of parameters that others need from this rank, and receive those that it needs."""
        staging = self.gradients.sums.take()
        try:
            self._exchange(group, routes, staging.flats)
        finally:
            self.gradients.sums.put_back(staging)

    def _exchange(self, group: Group, routes: Routes, staging: Sequence[torch.Tensor]) -> None:
        me = group.rank
        sends = [(flat, one, peer) for peer, needs in enumerate(routes) for flat, one in _flattened(needs) if one.source == me != peer]
        receives = [(flat, one) for flat, one in _flattened(routes[me]) if one.source != me]
        given = {(flat, one.lo, one.hi) for flat, one, _ in sends}
        self._copy(given, staging, inward=False)
        outgoing = [(staging[flat][one.lo : one.hi], peer) for flat, one, peer in sends]
        incoming = [(staging[flat][one.lo : one.hi], one.source) for flat, one in receives]
        group.start(outgoing, incoming, Tag.PARAMETERS).wait()
        self._copy({(flat, one.lo, one.hi) for flat, one in receives}, staging, inward=True)

    def _copy(self, spans: set[tuple[int, int, int]], staging: Sequence[torch.Tensor], *, inward: bool) -> None:
        """Copy between the parameters and the flat buffers."""
        parts = [(flat, part) for flat, lo, hi in sorted(spans) for part in self.kept.chunks.parts(flat, lo, hi)]
        live = [self.kept.chunks.view(*part) for _, part in parts]
        packed = [staging[flat][lo:hi] for flat, (_, lo, hi) in parts]
        if live:
            torch._foreach_copy_(*((live, packed) if inward else (packed, live)))


def _flattened(needs: Sequence[Sequence[Stretch]]) -> list[tuple[int, Stretch]]:
    return [(flat, one) for flat, stretches in enumerate(needs) for one in stretches if one.lo < one.hi]
