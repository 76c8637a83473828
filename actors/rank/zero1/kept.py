"""The chunks of a spread state that one rank keeps: what it claims of them when a view begins, and how it takes a step with them.

A rank that has said that its sums are here (:mod:`fleet.protocol.vote`) keeps them until it is clear what became of the step. When others
have taken it, it takes it behind them, from what it kept (:meth:`KeptChunks.resume`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from actors.rank.membership.process_group import Group
from actors.rank.state.saving import Share
from actors.rank.step.clipping import SplitNorms, clip_factor, plain_factor
from actors.rank.step.flats import GradientSet
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.layout import LayoutInputs, OwnWord, all_finite, gradients_there
from actors.rank.step.reduction import Chunk
from actors.rank.zero1.chunked import OptimizerChunks
from actors.rank.zero1.whole import ShardedTensors, WholeModule, named, whole_state
from fleet.protocol.chunks import Claim, bounds
from fleet.protocol.types import StateId

FIXED = "it did not require a gradient at run.track, and chunks of the optimizer's state are cut by those that did"
"""Why no other parameter may train later."""


class KeptChunks:
    """Of one rank.

    Args:
        chunks: of the optimizers, each of which is tracked in the place of the user's.

    Attributes:
        complete: the parameters are of the state everywhere, not in this rank's chunks alone.
    """

    def __init__(self, given: LayoutInputs, gradients: GradientBuffers, chunks: OptimizerChunks) -> None:
        self._given, self._gradients, self.chunks = given, gradients, chunks
        chunks.stepped = lambda: gradients.trained.stepped
        for tracked in chunks.tracked:
            given.state.replace(tracked.optimizer, tracked)
        self.complete = True
        self._sums: GradientSet | None = None
        self._norms = SplitNorms((), ())
        self._then: list[Callable[[], None]] = []

    # ---- where this rank stands ----------------------------------------------------------------------------------------------------------

    def claim(self, node: int) -> Claim:
        """What this rank holds."""
        chunks = self.chunks
        return self._given.vote.claim(self._given.duties.at, chunks.chunks, chunks.beside, complete=self.complete, node=node)

    def begin(self, state: StateId) -> None:
        """All of ``state`` was loaded or built here."""
        self.chunks.drop_beside()
        self._given.duties.at, self.complete, self._then = state, True, []

    def lose(self) -> None:
        """The chunks held here are of no use: all are taken from others."""
        self.chunks.drop()
        self._given.duties.at, self._then = None, []

    def reads(self, state: StateId) -> bool:
        """Whether every rank can read its chunks of ``state``, and needs nobody for them."""
        return self.chunks.readable and state.step == 0

    def place(self, state: StateId) -> None:
        """The chunks of the view are here, all at ``state``."""
        self._given.duties.at, self.complete = state, True
        self.forget_sums()

    # ---- sums of a step that others may have taken ---------------------------------------------------------------------------------------

    def hold(self) -> None:
        """The group is gone: what this rank may take a step from stays."""
        if self._given.vote.keeps and self._sums is None:
            self._sums = self._gradients.take_mean()

    def forget_sums(self) -> None:
        """No step is taken from them."""
        if self._sums is not None:
            self._gradients.give_mean(self._sums)
            self._gradients.hold()
            self._sums = None

    def resume(self) -> None:
        """The sums that were kept are those of the step at hand, which others have taken."""
        assert self._sums is not None, "a step is taken behind others without its sums"
        self._gradients.give_mean(self._sums)
        self._sums = None
        self.chunks.drop_beside()

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def word(self, group: Group) -> OwnWord:
        """The sums of this rank's chunks are here: whether they are finite, and how large they are."""
        flats, extents = self._gradients.mean.flats, self.chunks.extents
        stepping = self._gradients.layout.flats_of(self._given.update.taken)
        mine = [flats[flat][slice(*bounds(extents[flat], (group.size, group.rank)))] for flat in stepping]
        rest = [flat[extent:] for flat, extent in zip(flats, extents, strict=True)]
        finite, self._norms = all_finite([*mine, *rest]), self._split(group.size)
        return OwnWord(finite, norms=self._norms.take(flats, group.rank, self._given.update.unscaling))

    def agree(self, rows: torch.Tensor) -> float:
        """By which the gradients are clipped: ``rows`` are all ranks' norms."""
        update = self._given.update
        clipped = next(update.clipped, None)
        if clipped is None:
            return 1.0
        flats = self._gradients.layout.flats_of(clipped.optimizers)
        if self._given.settings.shards == 1 and not self._gradients.layout.leaving:
            return plain_factor([gradient * update.unscaling for gradient in gradients_there(self._gradients, flats)], clipped.norm)
        return clip_factor(self._norms.in_order(rows), flats, clipped.norm)

    def _split(self, size: int) -> SplitNorms:
        """Norms of each rank's chunks, when there is something to clip."""
        extents = self.chunks.extents
        chunks = [[Chunk(flat, *bounds(extent, (size, index))) for flat, extent in enumerate(extents)] for index in range(size)]
        clips = next(self._given.update.clipped, None) is not None
        return SplitNorms(chunks if clips else [()] * size, extents)

    @contextlib.contextmanager
    def stepping(self, *, complete: bool) -> Iterator[list[torch.Tensor]]:
        """The chunks that are here are stepped meanwhile. ``complete``: all ranks have the parameters that they need then."""
        gradients, skipped = self._gradients, math.isnan(self._given.vote.factor)
        yield self.chunks.point(gradients.mean.flats, gradients.mean.present, skipped=skipped)
        self.complete = complete
        self.chunks.forget_gradients()
        for parameter in gradients.parameters:
            parameter.grad = None

    def afterwards(self, then: Callable[[], None]) -> None:
        """``then`` is to happen once the parameters are complete."""
        self._then.append(then)

    def conclude(self) -> None:
        """The parameters are complete: what waited for that happens."""
        self.complete = True
        waiting, self._then = self._then, []
        for then in waiting:
            then()

    # ---- all of the state ----------------------------------------------------------------------------------------------------------------

    def digest(self, group: Group, step: int) -> str:
        """All ranks call it together. Raises GroupBroken."""
        state, device = self._given.state, self._gradients.parameters[0].device
        whole = {name: WholeModule(group, self.chunks, device, live) for name, live in state.spread().items()}
        spread = {name: whole_state(group, self.chunks, one, device) for name, one in named(state, self.chunks).items()}
        return state.digest(step, {**whole, **spread})

    def share(self, group: Group) -> Share:
        """What this rank writes of a checkpoint."""
        return ShardedTensors(self._given.state, self.chunks, group.rank, group.size)
