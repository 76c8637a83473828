"""The chunks of a spread state that one rank keeps: its claim when a view begins, and how it takes a step with them.

A rank that has reported its sums (:mod:`fleet.protocol.vote`) keeps them until it knows whether the step was taken. If others have taken
the step, it takes the step later, from these sums (:meth:`KeptChunks.resume`).
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from actors.rank.membership.process_group import Group
from actors.rank.state.room import GIB, free_bytes
from actors.rank.state.saving import Share, StatePart
from actors.rank.step.clipping import SplitNorms, clip_factor, plain_factor
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.kept_sums import KeptSums
from actors.rank.step.layout import LayoutInputs, OwnWord, all_finite, gradients_there
from actors.rank.step.reduction import Chunk as Span
from actors.rank.zero1.chunked import MOST_RUNS, OptimizerChunks
from actors.rank.zero1.moving import MovingChunks
from actors.rank.zero1.whole import ShardedTensors, WholeModule, named, whole_state
from fleet.protocol.chunks import UNCUT, Chunk, Claim, StateCut, bounds, runs
from fleet.protocol.types import StateId

FIXED = "it did not require a gradient at run.track, and chunks of the optimizer's state are cut by those that did"
"""Why no further parameter may train later."""


class KeptChunks:
    """The chunks of one rank.

    Args:
        chunks: of the optimizers' state. Each replaces the user's optimizer in the tracked state.

    Attributes:
        complete: all parameters here are of the state, not only those of this rank's chunks.
        cut: of the last view.
        moving: brings chunks to other ranks beside the steps; None: all are where they belong.
        sums: kept of a step that others may have taken.
        adding: gives the chunks whose gradients this rank adds up in the present step, for a view that begins within it.
    """

    cut = UNCUT
    moving: MovingChunks | None = None

    def __init__(self, given: LayoutInputs, gradients: GradientBuffers, chunks: OptimizerChunks) -> None:
        self._given, self._gradients, self.chunks = given, gradients, chunks
        chunks.stepped = lambda: gradients.trained.stepped
        for tracked in chunks.tracked:
            given.state.replace(tracked.optimizer, tracked)
        self.complete = True
        self.sums = KeptSums(gradients, given.vote)
        self._norms = self._split_up = SplitNorms((), ())
        self._listed: StateCut | None = None
        self.adding: Callable[[], Collection[Chunk]] = lambda: ()
        self._then: list[Callable[[], None]] = []

    # ---- this rank's chunks --------------------------------------------------------------------------------------------------------------

    def claim(self, node: int) -> Claim:
        """The claim of this rank: the chunks that it holds, and their state."""
        chunks = self.chunks.chunks
        if self.moving is not None and len(runs(more := chunks + self.moving.claimed)) <= MOST_RUNS:
            chunks = more
        at, beside, adding = self._given.duties.at, self.chunks.beside, self.adding()
        return self._given.vote.claim(at, chunks, beside, complete=self.complete, node=node, adding=adding)

    def begin(self, state: StateId) -> None:
        """This rank has loaded or built all of ``state``."""
        self.chunks.drop_beside()
        self.move(None)
        self._given.duties.at, self.complete, self._then = state, True, []

    def lose(self) -> None:
        """This rank's chunks are of no use: it receives all from others."""
        self.chunks.drop()
        self.move(None)
        self._given.duties.at, self._then = None, []

    def reads(self, state: StateId) -> bool:
        """Whether each rank can read its chunks of ``state`` from files, without other ranks."""
        return self.chunks.readable and state.step == 0

    def place(self, state: StateId, cut: StateCut, rank: int) -> None:
        """This rank, ``rank`` of the view, has its chunks of ``cut``, all at ``state``."""
        self._given.duties.at, self.complete = state, True
        self.sums.forget()
        self._turn_to(cut, rank)

    def _turn_to(self, cut: StateCut, rank: int) -> None:
        self.cut, self.chunks.owned, self._listed = cut, cut.owned(rank), None
        self._gradients.cut_anew()

    @property
    def lacks(self) -> str:
        """The bytes that this rank lacks for its part of the state before it is in a view; empty: it has room.

        The part is an even one among ranks and spares, or that of a place in a group, with its copies. Whole parameters that the part
        replaces count as free.
        """
        chunks, settings = self.chunks, self._given.settings
        each, ranks = chunks.whole_bytes // settings.replica_size, settings.world + settings.spares
        part = each if settings.replica_size > 1 else each * (1 + settings.optimizer_copies) // ranks
        held = sum(one.nbytes for one in chunks.parameters if chunks.keeps_parameters and not one.is_meta)
        free = free_bytes(chunks.parameters[0].device) + held
        return f"it takes {part / GIB:.3g} GiB ({part} bytes), and there is room for {free / GIB:.3g}" if part > free else ""

    # ---- chunks that move beside the steps -----------------------------------------------------------------------------------------------

    @property
    def late(self) -> bool:
        """The loop is done with its shards, and slices of this rank's chunks are still on their way to it."""
        return self.moving is not None and self.moving.under_way

    def go_on(self) -> None:
        """All ranks have taken a step: the next slices leave."""
        if self.moving is not None:
            self.moving.begin()

    def arrive(self, room: Callable[[int, int, int], torch.Tensor], *, late: bool) -> None:
        """Before the vote on a step: wait for the slices that are under way, and give ranks the sums of slices in their new places.

        Raises GroupBroken.

        Args:
            room: memory for the sum of a stretch of a flat buffer, in the step's mean.
            late: :attr:`late` of some rank in this step.
        """
        if self.moving is not None:
            self.moving.arrive(self._gradients.mean.flats, room, late=late)

    def turn(self, rank: int) -> MovingChunks | None:
        """Behind a step: if all slices are in place, keep the chunks of the new cut alone. Then it gives what has moved them."""
        moving = self.moving
        if moving is None or not moving.over:
            return None
        self.move(None)
        self.chunks.recut(moving.wanted.kept(rank))
        self._turn_to(moving.wanted, rank)
        return moving

    def move(self, moving: MovingChunks | None) -> None:
        """From now on ``moving`` brings chunks to their places; None: nothing moves any more."""
        self.stop()
        self.moving = moving
        self._given.recorder.moving(moving is not None)

    def stop(self) -> None:
        """The view is over: nothing moves any more. Slices in place stay."""
        if self.moving is not None:
            self.moving.stop()

    # ---- sums of a step that others may have taken ---------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Make the kept sums those of the current step, which others have taken."""
        self.sums.resume()
        self.chunks.drop_beside()

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def word(self, group: Group) -> OwnWord:
        """This rank's judgement of the sums of its chunks: whether they are finite, and their norms."""
        flats, extents = self._gradients.mean.flats, self.chunks.extents
        stepping = self._gradients.layout.flats_of(self._given.update.taken)
        mine = [flats[flat][slice(*bounds(extents[flat], chunk))] for flat in stepping for chunk in self.cut.owned(group.rank)]
        rest = [flat[extent:] for flat, extent in zip(flats, extents, strict=True)]
        finite, self._norms = all_finite([*mine, *rest]), self._split(group.size)
        return OwnWord(finite, norms=self._norms.take(flats, group.rank, self._given.update.unscaling))

    @property
    def clips(self) -> bool:
        """The step clips the gradient, and so the ranks tell each other its norms."""
        return next(self._given.update.clipped, None) is not None

    def blocks(self, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """By flat buffer of the step, the norms of its blocks in order. ``rows``: the norms of all ranks."""
        flats, found = self._gradients.layout.flats_of(self._given.update.taken), defaultdict[int, list[torch.Tensor]](list)
        for flat, norms in self._norms.in_order(rows):
            found[flat].append(norms)
        return {flat: torch.cat(norms) for flat, norms in found.items() if flat in flats}

    def agree(self, rows: torch.Tensor) -> float:
        """The factor that clips the gradients. ``rows``: the norms of all ranks."""
        update = self._given.update
        clipped = next(update.clipped, None)
        if clipped is None:
            return 1.0
        flats = self._gradients.layout.flats_of(clipped.optimizers)
        if self._given.settings.shards == 1 and not self._gradients.layout.leaving:
            return plain_factor([gradient * update.unscaling for gradient in gradients_there(self._gradients, flats)], clipped.norm)
        return clip_factor(self._norms.in_order(rows), flats, clipped.norm)

    def _split(self, size: int) -> SplitNorms:
        """The norms of each rank's chunks; none if the step does not clip. The chunks of all ranks are listed once for each cut."""
        extents = self.chunks.extents
        if not self.clips:
            return SplitNorms([()] * size, extents)
        if self._listed is not self.cut:
            count, (owned, _) = self.cut.size, self.cut.by_rank(size)
            chunks = [[Span(flat, *bounds(extent, (count, one))) for flat, extent in enumerate(extents) for one in mine] for mine in owned]
            self._listed, self._split_up = self.cut, SplitNorms(chunks, extents)
        return self._split_up

    @contextlib.contextmanager
    def stepping(self, *, complete: bool) -> Iterator[list[torch.Tensor]]:
        """Context in which the optimizers step this rank's chunks. ``complete``: afterwards all ranks have the parameters that they
        need."""
        gradients, skipped = self._gradients, math.isnan(self._given.vote.factor)
        yield self.chunks.point(gradients.mean.flats, gradients.mean.present, skipped=skipped)
        self.complete = complete
        self.chunks.forget_gradients()
        for parameter in gradients.parameters:
            parameter.grad = None

    def afterwards(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the parameters are complete."""
        self._then.append(then)

    def conclude(self) -> None:
        """The parameters are complete: call the functions that waited for that."""
        self.complete = True
        waiting, self._then = self._then, []
        for then in waiting:
            then()

    # ---- the whole state -----------------------------------------------------------------------------------------------------------------

    def digest(self, group: Group, step: int, rest: Mapping[str, Any] = MappingProxyType({})) -> str:
        """The digest of the whole state. All ranks call it together. Raises GroupBroken. ``rest``: see ``TrackedState.digest``."""
        state, device = self._given.state, self._gradients.parameters[0].device
        whole = {name: WholeModule(group, self.chunks, device, live) for name, live in state.spread().items()}
        spread = {name: whole_state(group, self.chunks, one, device) for name, one in named(state, self.chunks).items()}
        return state.digest(step, {**rest, **whole, **spread})

    def share(self, state_part: StatePart) -> Share:
        """The part of a checkpoint that this rank writes."""
        return ShardedTensors(self._given.state, self.chunks, state_part)
