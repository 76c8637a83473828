"""Where parameters and moments lie, and what follows from that for a step: all in which whole replicas and spread states differ.

:class:`actors.rank.step.train_step.TrainStep` asks its layout, and has no branch for any. A layout of one's own is a class derived
from :class:`StateLayout`, and a row in :data:`fleet.protocol.layouts.KINDS`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch

from actors.rank.fsdp.taken import numbers
from actors.rank.membership.process_group import Group
from actors.rank.state.saving import Share, WholeTensors
from actors.rank.state.tracked import TrackedState
from actors.rank.step.clipping import FlatNorms, SplitNorms, block_norms, clip, clip_factor, plain_factor, total_norm
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.injections import Injections
from actors.rank.step.reduction import Reducer
from actors.rank.step.update import Update
from actors.rank.step.weights import ShardWeights
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import ConfigError
from fleet.protocol.duties import Duties
from fleet.protocol.layouts import LAYOUTS
from fleet.protocol.types import StateId
from fleet.protocol.vote import CommitVote
from fleet.settings.run import RunSettings


@dataclass(frozen=True)
class LayoutInputs:
    """What a layout is made of.

    Attributes:
        update: of the tracked objects; ``duties`` has the state that the step at hand begins from.
        weights: of the shard at hand.
        host: at which this rank serves its peers.
        called_away: whether the view is about to change.
        outside: whether this rank is out of its view.
        alone: whether it does what is done once in the run, which may begin again.
    """

    state: TrackedState
    settings: RunSettings
    recorder: Recorder
    update: Update
    duties: Duties
    vote: CommitVote
    weights: ShardWeights
    injections: Injections
    host: str = "127.0.0.1"
    called_away: Callable[[], bool] = lambda: False
    outside: Callable[[], bool] = lambda: False
    alone: Callable[[], bool] = lambda: False


NOTHING = torch.zeros(0, dtype=torch.float64, device="cpu")


class OwnWord(NamedTuple):
    """What a rank finds of the sums that it has: whether they are finite.

    ``norm``: of all of the gradient, where it has that; ``norms``: of the blocks of its part, for the others.
    """

    finite: bool
    norm: float = math.nan
    norms: torch.Tensor = NOTHING


class StateLayout:
    """One rank's part of a state, as a step needs it.

    This one is of whole replicas: each rank has all of the state, and all of the sum, so that it finds what the others find, by itself. A
    layout in which ranks keep parts, or keep them elsewhere, overrides what is otherwise there. It knows the ranks of one column.

    Attributes:
        gradients: by shard, and their mean; ``reducer`` sums them.
        fixed: why no parameter may train that did not at first; empty where it may.
        leave: gradients of units leave the rank in the backward, and are summed elsewhere.
        kept: the chunks of a state that is spread, see :class:`actors.rank.zero1.kept.KeptChunks`; None of whole replicas.
    """

    fixed = ""
    leave = False
    kept: Any = None
    sums: type[Reducer] = Reducer

    def __init__(self, given: LayoutInputs) -> None:
        settings, state = given.settings, given.state
        self.given = given
        known = state.trained if self.fixed else ()  # a loop may freeze them behind run.track, and thaw them later
        watched = settings.overlap and not self.leave and not state.casts
        self.gradients = GradientBuffers(
            state.modules,
            settings.shards,
            numbers(state.units),
            leave=self.leave,
            watched=watched,
            fixed=self.fixed,
            known=known,
            owners=given.update.owners,
        )
        state.marks, state.mark = self.gradients.trained.marks, self.gradients.mark
        if not self.gradients.parameters:
            raise ConfigError("track", sorted(state.objects), "no module with parameters that require a gradient", "Track model=... too.")
        kind = "native" if settings.reduction == "native" else "ordered"
        # Not in two levels where sums are checked: the owner would be blamed for what another rank has combined.
        two_levels = settings.two_level_sums and not settings.verify.compute and not self.leave
        cores = settings.overlap_cores if watched and settings.threads_per_rank == 1 else math.inf
        self.reducer = self.sums(settings.shards, kind, two_levels=two_levels, overlap_cores=cores)
        self._norms: list[FlatNorms] = []
        self._split, self._split_of = SplitNorms((), ()), list[torch.nn.Parameter]()

    @property
    def useless(self) -> str:
        """Why what the loop body computes now does not count: this rank could not have what it needs for it. Empty while it does."""
        return ""

    @property
    def weights(self) -> list[torch.Tensor]:
        """The memory of the parameters that is here between steps."""
        return list(self.gradients.parameters)

    @property
    def spares_newcomers(self) -> bool:
        """Whether a rank can take a step of which it has computed nothing: not when a forward counts something that only it knows."""
        return self.gradients.buffers.constant

    def counts(self, held: Collection[int]) -> Collection[int]:
        """Which of the shards that this rank holds count in a view that begins within the step."""
        return held

    def begin(self, state: StateId) -> None:
        """All of ``state`` was loaded or built here."""

    def join(self, group: Group) -> None:
        """Steps are taken with these ranks, those of one column, from now on."""
        self.group, self._split_of = group, []

    # ---- compute -------------------------------------------------------------------------------------------------------------------------

    def begin_shard(self, shard: int) -> None:
        """Right before the forward of ``shard``."""

    def end_shard(self, shard: int, loss: float) -> None:
        """Its backward is over."""

    def repeat(self) -> None:
        """The step is computed anew by all."""

    def reset(self) -> None:
        """Nothing of the present attempt remains."""

    def hold(self) -> None:
        """The group is gone or left; what this rank has computed of the step stays."""

    # ---- reduce --------------------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """All that has left this rank in the backward has arrived. Raises GroupBroken."""

    def split_norms(self) -> SplitNorms:
        """Which norms of blocks each rank sends beside the gradients: of the part that it alone adds up; none with a gradient scaler.

        Of a state that is spread they go with the word that the sums are here, when there is something to clip.
        """
        gradients = self.gradients
        if self._split_of is not gradients.parameters:
            beside = self.given.update.scaler is None and self.kept is None
            parts = self.reducer.parts(gradients.layout.meta) if beside else [[] for _ in range(self.group.size)]
            self._split, self._split_of = SplitNorms(parts, gradients.layout.extents), gradients.parameters
        return self._split

    def keep_norms(self, norms: Sequence[FlatNorms]) -> None:
        """What came of that: of all blocks, in order. Empty where the mean has changed since."""
        self._norms = list(norms)

    def settle(self, divisor: float) -> None:
        """The sums to step with are here, divided by ``divisor``. Raises GroupBroken."""

    # ---- vote ----------------------------------------------------------------------------------------------------------------------------

    def word(self) -> OwnWord:
        """What this rank finds of its sums. With a gradient scaler infinite ones are its business: it skips the update."""
        if self.given.update.scaler is not None:
            return OwnWord(True)
        flats, extents = self.gradients.mean.flats, self.gradients.layout.extents
        self._norms = self._norms or self._all_norms()
        stepping = self.gradients.layout.flats_of(self.given.update.taken)
        norm = total_norm(self._norms, stepping)
        cuts = [(flat, extent) for flat, extent in zip(flats, extents, strict=True) if flat.is_floating_point()]
        rest = [flat[extent:] for flat, extent in cuts if extent < flat.numel()]
        counted = [whole if flat in stepping else whole[extents[flat] :] for flat, whole in enumerate(flats)]
        return OwnWord((math.isfinite(norm) and all_finite(rest)) or all_finite(counted), norm)

    def _all_norms(self) -> list[FlatNorms]:
        parts = zip(self.gradients.mean.flats, self.gradients.layout.extents, strict=True)
        return [FlatNorms(flat, block_norms(whole[:extent])) for flat, (whole, extent) in enumerate(parts)]

    # ---- apply ---------------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self) -> Iterator[list[torch.Tensor]]:
        """Around all that changes the state by a step, from the sums that are here. Gives the gradients that the optimizers step with."""
        gradients = self.gradients
        yield [flat[:extent] for flat, extent in zip(gradients.mean.flats, gradients.layout.extents, strict=True)]

    def clip(self, gradients: list[torch.Tensor]) -> None:
        """Those of :meth:`stepping`. Behind the scaler, which has unscaled them."""
        if self.given.vote.spread:
            clip(gradients, self.given.vote.factor)
            return
        for clipped in self.given.update.clipped:
            flats = self.gradients.layout.flats_of(clipped.optimizers)
            clip([gradients[flat] for flat in flats], self._clip_factor(flats, clipped.norm))

    def _clip_factor(self, flats: Collection[int], norm: float) -> float:
        if self.given.settings.shards == 1:
            return plain_factor(gradients_there(self.gradients, flats), norm)
        return clip_factor(self._norms if self.given.update.scaler is None else self._all_norms(), flats, norm)

    # ---- publish -------------------------------------------------------------------------------------------------------------------------

    def publish(self, then: Callable[[], None]) -> None:
        """Bring what others need of the step to them, then call ``then``. Raises GroupBroken: it is called once all of them have it."""
        then()

    # ---- a view begins, where chunks of the state move -----------------------------------------------------------------------------------

    def moving(self) -> contextlib.AbstractContextManager[None]:
        """Around what changes what is held here."""
        return contextlib.nullcontext()

    def introduce(self, group: Group) -> None:
        """The members of a view are about to be placed: what they have to know of each other for it. Raises GroupBroken."""

    def place(self, state: StateId, guarded: Sequence[Sequence[int]], asked: Sequence[tuple[int, ...]]) -> None:
        """The chunks of the view are here, all at ``state``. By chunk, ``guarded`` says who guards it, ``asked`` whom this rank asks."""

    def gather(self, group: Group, routes: Any) -> None:
        """Bring the parameters to all who keep them whole. Raises GroupBroken."""

    # ---- between steps -------------------------------------------------------------------------------------------------------------------

    def readable(self) -> contextlib.AbstractContextManager[Any]:
        """All parameters of the model can be read here meanwhile, by this rank alone."""
        return contextlib.nullcontext()

    def unread(self) -> contextlib.AbstractContextManager[Any]:
        """Around what may not read the parameters, if they are not whole here."""
        return contextlib.nullcontext()

    def digest(self, step: int) -> str:
        """Of all of the state, after ``step`` steps; the same on all ranks, which call it together. Raises GroupBroken."""
        return self.given.state.digest(step)

    def share(self) -> Share:
        """What this rank writes of a checkpoint, as one of the ranks of its view."""
        return WholeTensors(self.given.state, self.group.rank, self.group.size)


MakeLayout = Callable[[LayoutInputs], StateLayout]


def layout_of(name: str) -> MakeLayout:
    """The class that the table names."""
    module, _, kind = LAYOUTS[name].where.partition(":")
    return cast(MakeLayout, getattr(import_module(module), kind))


def gradients_there(gradients: GradientBuffers, flats: Collection[int]) -> list[torch.Tensor]:
    """Of the parameters in ``flats`` that have one."""
    found = zip(gradients.parameters, gradients.layout.gradients, strict=True)
    return [parameter.grad for parameter, place in found if parameter.grad is not None and place.flat in flats]


def all_finite(flats: Sequence[torch.Tensor]) -> bool:
    """Each element of each."""
    return all(bool(torch.isfinite(flat).all()) for flat in flats)
