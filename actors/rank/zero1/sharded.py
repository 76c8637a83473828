"""A step with sharded optimizer state (``optimizer_sharding = "zero1"``).

Each rank sums one chunk of the gradient, steps that chunk of the parameters, and sends it to all. A few other ranks, its *guards*, get the
sum too and take the same step on their copy of the chunk's state, so that the copy has the same bits and no state is ever sent while all is
well. Steps commit in two phases:

1. Sums go to owners and guards, and all tell all that they have theirs (:mod:`fleet.protocol.vote`). Until then nothing is changed: when a
   rank is lost, all are at the step's beginning.
2. Each steps what it holds, by itself. When a rank is lost now, whoever has not yet taken the step takes it, from the sums that it has
   (:meth:`ShardedEngine.advance`); so the step is done everywhere, and only the parameters have to be sent again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from actors.rank.membership.process_group import Group
from actors.rank.state.saving import Share
from actors.rank.state.tracked import TrackedState
from actors.rank.step.clipping import SplitNorms, clip_factor, plain_factor
from actors.rank.step.engine import Engine
from actors.rank.step.flats import GradientSet
from actors.rank.step.outcome import ReductionOutcome
from actors.rank.step.reduction import Bucket, Chunk, Reducer
from actors.rank.tags import Tag
from actors.rank.telemetry.recorder import Recorder
from actors.rank.zero1.chunked import ChunkedOptimizer, check
from actors.rank.zero1.whole import ShardedTensors, WholeModule, whole_state
from fleet.protocol.chunks import WHOLE, Claim, Stretch, bounds, cut_points, kept, route
from fleet.protocol.member import Offer
from fleet.protocol.records import COMM
from fleet.protocol.types import StateId
from fleet.protocol.vote import Words
from fleet.settings.run import RunSettings

Routes = list[list[list[Stretch]]]
"""By view rank and flat buffer: what it needs, and from whom."""


def check_tracked(state: TrackedState, threads: int) -> None:
    """Raises ConfigError for what is tracked and cannot be sharded without changing bits."""
    parameters = [parameter for module in state.modules.values() for parameter in module.parameters() if parameter.requires_grad]
    for optimizer in state.optimizers.values():
        check(optimizer, parameters, threads)


class _StretchBucket(Bucket):
    """One stretch of every rank's chunk of one flat buffer."""

    def __init__(self, flat: int, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(flat, 0, 0, 1)
        self._spans = spans

    def place(self, rank: int) -> Chunk:
        return Chunk(self.flat, *self._spans[rank])


class ShardedReducer(Reducer):
    """Sums of gradients stay with the owner of their chunk and its guards; what comes after them in a flat buffer goes to all.

    Attributes:
        guarded: by chunk, the view ranks that guard it.
        extents: by flat buffer, how many of its elements are gradients.
    """

    guarded: Sequence[Sequence[int]] = ((),)
    extents: Sequence[int] = ()

    def _swaps(self, flats: Sequence[torch.Tensor]) -> bool:
        return False  # a rank is not to have the sums of all chunks

    def _buckets(self, flats: Sequence[torch.Tensor], size: int) -> list[Bucket]:
        """Each has a stretch of every chunk; the last stretches come first."""
        found: list[tuple[float, int, Bucket]] = []
        for flat, extent in enumerate(self.extents):
            chunks = [bounds(extent, (size, index)) for index in range(size)]
            longest = max(hi - lo for lo, hi in chunks) * flats[flat].element_size()
            count = -(-longest * size // self._most_bytes(flats[flat]))
            cut = [cut_points(lo, hi, count) for lo, hi in chunks] if count else []
            found += [((i + 1) / count, flat, _StretchBucket(flat, [(cuts[i], cuts[i + 1]) for cuts in cut])) for i in range(count)]
            rest = flats[flat].numel()
            count = -(-(rest - extent) * flats[flat].element_size() // self._bucket_bytes)
            cut_rest = cut_points(extent, rest, count) if count else []
            found += [(0.0, flat, Bucket(flat, lo, hi, size)) for lo, hi in itertools.pairwise(cut_rest)]
        return [bucket for _, _, bucket in sorted(found, key=lambda one: one[:2], reverse=True)]

    def _comes_back(self, bucket: Bucket) -> bool:
        return not isinstance(bucket, _StretchBucket)

    def _contributions(self, bucket: Bucket, mine: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        if self._comes_back(bucket):
            return super()._contributions(bucket, mine)
        assert self._group is not None
        return [(mine, guard) for guard in self.guarded[self._group.rank]]

    def _returns(self, bucket: Bucket, out: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        if self._comes_back(bucket):
            return super()._returns(bucket, out)
        assert self._group is not None
        owners = [owner for owner, guards in enumerate(self.guarded) if self._group.rank in guards]
        return [(bucket.chunk(out, owner), owner) for owner in owners]


class ShardedEngine(Engine):
    """An :class:`Engine` whose optimizer's state is spread over the ranks of the view. See the module.

    Attributes:
        chunks: the optimizer, which is tracked in the place of the user's.
        complete: the parameters are of the state everywhere, not in this rank's chunks alone.
        loss: the mean over shards.
    """

    _fixed = "it did not require a gradient at run.track, and chunks of the optimizer's state are cut by those that did"
    _spread = True
    _gathers = True
    """After each step the parameters go to all, who have them whole."""

    def __init__(self, state: TrackedState, settings: RunSettings, recorder: Recorder, clip_norm: float | None) -> None:
        check_tracked(state, settings.threads_per_rank)
        super().__init__(state, settings, recorder, clip_norm)
        self.chunks = self._cut()
        self.chunks.stepped = lambda: self._gradients.stepped
        state.replace(self._optimizer, self.chunks)
        self.complete = True
        self.loss, self._advanced = math.nan, -1
        self._guarded: Sequence[Sequence[int]] = ((),)
        self._log: GradientSet | None = None
        self._then: list[Callable[[], None]] = []
        self._routes: Routes = []

    def _cut(self) -> ChunkedOptimizer:
        gradients = self._gradients
        return ChunkedOptimizer(self._optimizer, gradients.parameters, gradients.places, gradients.extents)

    def _make_reducer(self, settings: RunSettings) -> Reducer:
        reducer = ShardedReducer(settings.shards, two_levels=self._in_two_levels(settings), overlap_cores=self._overlap_cores(settings))
        leaving = self._gradients.leaving
        reducer.extents = [0 if flat in leaving else extent for flat, extent in enumerate(self._gradients.extents)]
        return reducer

    # ---- where this rank stands --------------------------------------------------------------------------------------------------------

    @property
    def spares_newcomers(self) -> bool:
        """Chunks move before the step, and everyone waits for them."""
        return False

    def claim(self, node: int) -> Claim:
        """What this rank holds."""
        if self._state is None:
            return Claim(None, node=node)
        vote = self.vote
        chunks = self.chunks.chunks + (() if vote.keeps else self.chunks.beside)  # whoever steps, steps the first ones alone
        return Claim(self._state, vote.keeps, vote.factor, self.complete, node, chunks)

    def begin(self, state: StateId) -> None:
        """All of ``state`` was loaded or built here."""
        super().begin(state)
        self.reset()
        self.chunks.drop_beside()
        self._state, self.complete, self._then = state, True, []

    def lose(self) -> None:
        """What is held here is of no use: all is taken from others."""
        self.reset()
        self.chunks.drop()
        self._state, self._then = None, []

    def reads(self, state: StateId) -> bool:
        """Whether every rank can read its chunks of ``state``, and needs nobody for them."""
        return self.chunks.readable and state.step == 0

    def moving(self) -> AbstractContextManager[None]:
        """Around what changes what is held here."""
        return nullcontext()

    def introduce(self, group: Group) -> None:
        """The members of a view are about to be placed: what they have to know of each other for it. Raises GroupBroken."""

    def place(self, state: StateId, guarded: Sequence[Sequence[int]], asked: Sequence[tuple[int, ...]] = ()) -> None:
        """The chunks of the view are here, all at ``state``; ``asked`` says, by chunk, whom this rank asks for it, in order."""
        self._state, self._guarded, self.complete = state, guarded, True
        assert isinstance(self._reducer, ShardedReducer)
        self._reducer.guarded = guarded
        if self._gathers:
            size = len(guarded)
            held = [kept(guarded, rank) for rank in range(size)]
            self._routes = [[route(held, [WHOLE], extent, rank) for extent in self.chunks.extents] for rank in range(size)]
        self._forget_log()

    def reset(self) -> None:
        self._forget_log()
        super().reset()

    def hold(self) -> None:
        if self.vote.keeps and self._log is None:
            self._log = self._gradients.take_mean()
        super().hold()

    def _forget_log(self) -> None:
        if self._log is not None:
            self._gradients.give_mean(self._log)
            self._gradients.hold()
            self._log = None

    @property
    def _name(self) -> str:
        return next(name for name, one in self.state.objects.items() if one is self.chunks)

    def digest(self, step: int) -> str:
        """All ranks call it together. Raises GroupBroken."""
        whole = {name: WholeModule(self._group, self.chunks, self.device, live) for name, live in self.state.spread().items()}
        return self.state.digest(step, {**whole, self._name: whole_state(self._group, self.chunks, self.device)})

    def share(self) -> Share:
        return ShardedTensors(self.state, self._name, self.chunks, self._group.rank, self._group.size)

    # ---- phase 1: all have their sums --------------------------------------------------------------------------------------------------

    def reduce(self, offer: Offer, *, early: bool = False) -> ReductionOutcome:
        reduced = super().reduce(offer, early=early)
        self.loss, self._advanced = reduced.loss, -1
        return reduced

    def words(self) -> Words:
        """Tell all that the sums are here, and how large they are."""
        group, flats, extents = self._group, self._gradients.mean_flats, self.chunks.extents
        mine = [flat[slice(*bounds(extent, (group.size, group.rank)))] for flat, extent in zip(flats, extents, strict=True)]
        rest = [flat[extent:] for flat, extent in zip(flats, extents, strict=True)]
        norms = self._clip_norms
        finite = all(bool(torch.isfinite(part).all()) for part in [*mine, *rest])
        row = torch.cat([torch.tensor([finite], dtype=torch.float64, device="cpu"), norms.take(flats, group.rank, self._unscaling)])
        rows = torch.empty(group.size, len(row), dtype=torch.float64, device="cpu")
        group.all_gather(rows, row, Tag.READY)
        said = rows[:, 0].tolist()
        found = tuple(bool(said[rank]) for rank in self.vote.voters(group.size))
        factor = self._factor(norms, rows[:, 1:]) if all(found) else math.nan
        return Words(found, factor=factor, skips=self._scaler is not None)

    def _factor(self, norms: SplitNorms, rows: torch.Tensor) -> float:
        """By which the gradients are clipped: ``rows`` are all ranks' norms."""
        if self._clip_norm is None:
            return 1.0
        if self._shards == 1 and not self._gradients.leaving:
            return plain_factor([gradient * self._unscaling for gradient in self._there], self._clip_norm)
        return clip_factor(norms.in_order(rows), self._clip_norm)

    @property
    def _unscaling(self) -> float:
        """By which a gradient scaler multiplies the gradient before it is clipped, rounded as it does."""
        return 1.0 if self._scaler is None else float(torch.tensor(self._scaler.get_scale(), device="cpu").double().reciprocal().float())

    @property
    def _reports_norms(self) -> bool:
        return False  # but with the word that the sums are here, when there is something to clip

    @property
    def _clip_norms(self) -> SplitNorms:
        """Of each rank's chunks, when there is something to clip."""
        size, extents = self._group.size, self.chunks.extents
        chunks = [[Chunk(flat, *bounds(extent, (size, index))) for flat, extent in enumerate(extents)] for index in range(size)]
        return SplitNorms(chunks if self._clip_norm is not None else [()] * size, extents)

    # ---- phase 2: each by itself -------------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Step the chunks that are here. The parameters are complete after :meth:`complete_with`."""
        gradients = self._gradients
        self._stepped = self.chunks.point(gradients.mean_flats, gradients.mean_present, skipped=math.isnan(self.vote.factor))
        super().apply()
        self.complete = self._group.size == 1 or not self._gathers
        self._stepped = []
        self.chunks.forget_gradients()
        for parameter in self._gradients.parameters:
            parameter.grad = None

    def _clip(self, norm: float) -> None:
        if self._stepped and self.vote.factor < 1.0:  # of a small model a rank may hold nothing
            torch._foreach_mul_(self._stepped, self.vote.factor)

    def advance(self) -> None:
        """Take the step that others have taken already, from the sums that are still here."""
        assert self._log is not None, "advance() without the sums"
        self._gradients.give_mean(self._log)
        self._log = None
        self.chunks.drop_beside()
        self.apply()
        self.complete = not self._gathers
        assert self._state is not None
        self._advanced = self._state.step - 1

    def outcome_of(self, step: int) -> ReductionOutcome | None:
        advanced, self._advanced = self._advanced, -1
        return ReductionOutcome([], self.loss) if advanced == step else None

    # ---- the parameters go to all ------------------------------------------------------------------------------------------------------

    def finish(self, then: Callable[[], None]) -> None:
        """Bring the parameters to the state, then call ``then``. Raises GroupBroken: it is called once they are complete."""
        self.afterwards(then)
        if not self.complete:
            before = self._recorder.code
            self._recorder.switch(COMM)
            self.gather(self._group, self._routes)
            self._recorder.switch(before)
        self.conclude()

    def afterwards(self, then: Callable[[], None]) -> None:
        """``then`` is to happen once the parameters are complete."""
        self._then.append(then)

    def conclude(self) -> None:
        """The parameters are complete: what waited for that happens."""
        self.complete = True
        waiting, self._then = self._then, []
        for then in waiting:
            then()

    def gather(self, group: Group, routes: Routes) -> None:
        """Give the stretches of the parameters that others need from here, and take those that this rank needs. Raises GroupBroken."""
        staging = self._gradients.take()
        try:
            self._exchange(group, routes, staging.flats)
        finally:
            self._gradients.give_back(staging)

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
        """Between the parameters and the flat buffers."""
        parts = [(flat, part) for flat, lo, hi in sorted(spans) for part in self.chunks.parts(flat, lo, hi)]
        live = [self.chunks.view(*part) for _, part in parts]
        packed = [staging[flat][lo:hi] for flat, (_, lo, hi) in parts]
        if live:
            torch._foreach_copy_(*((live, packed) if inward else (packed, live)))


def _flattened(needs: Sequence[Sequence[Stretch]]) -> list[tuple[int, Stretch]]:
    return [(flat, one) for flat, stretches in enumerate(needs) for one in stretches if one.lo < one.hi]
