"""Where parameters and moments lie, and how a step depends on that: all differences between whole replicas and spread states.

:class:`actors.rank.step.train_step.TrainStep` asks its layout, and has no branch for any. A further layout is a class derived from
:class:`StateLayout`, and a row in :data:`fleet.protocol.layouts.KINDS`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch

from actors.rank.membership.process_group import Group
from actors.rank.state.saving import Share, StatePart, WholeTensors
from actors.rank.state.tracked import TrackedState
from actors.rank.step.clipping import FlatNorms, SplitNorms, block_norms, clip, clip_factor, plain_factor, total_norm
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.injections import Injections
from actors.rank.step.reduction import Reducer
from actors.rank.step.update import Update
from actors.rank.step.weights import ShardWeights
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import ConfigError
from fleet.protocol.chunks import StateCut
from fleet.protocol.duties import Duties
from fleet.protocol.layouts import LAYOUTS
from fleet.protocol.pipelining import Ways
from fleet.protocol.types import StateId, View
from fleet.protocol.vote import CommitVote
from fleet.settings.run import RunSettings


@dataclass(frozen=True)
class LayoutInputs:
    """The arguments of a layout.

    Attributes:
        update: of the tracked objects; ``duties`` has the state that the step at hand begins from.
        weights: of the shard at hand.
        host: the address at which this rank serves its peers.
        called_away: whether the view is about to change.
        outside: whether this rank is out of its view.
        alone: whether this rank does work that is done once in the run, and may begin again.
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
    """A rank's judgement of the sums that it has: whether they are finite.

    ``norm``: of the whole gradient, where the rank has it; ``norms``: of the blocks of its part, for the other ranks.
    """

    finite: bool
    norm: float = math.nan
    norms: torch.Tensor = NOTHING


class StateLayout:
    """One rank's part of a state, as a step needs it.

    This class is for whole replicas: each rank has the whole state and the whole sum, so all ranks judge a sum alike by themselves. A
    layout whose ranks keep parts, or keep them elsewhere, overrides the methods that differ. A layout knows the ranks of one column.

    Attributes:
        gradients: by shard, and their mean; ``reducer`` sums them.
        fixed: why no parameter may train that did not train at first; empty where it may.
        leave: gradients of units leave the rank in the backward, and other code sums them.
        kept: the chunks of a state that is spread, see :class:`actors.rank.zero1.kept.KeptChunks`; None of whole replicas.
    """

    fixed = ""
    leave = False
    kept: Any = None
    sums: type[Reducer] = Reducer

    def __init__(self, given: LayoutInputs) -> None:
        settings, state = given.settings, given.state
        self.given = given
        known = state.trained if self.fixed else ()  # a loop may freeze them after run.track, and thaw them later
        beside = not math.isinf(settings.overlap_cores) and settings.group == 1
        watched = beside and not self.leave and not state.casts
        self.gradients = GradientBuffers(
            state.modules,
            settings.shards,
            state.numbers,
            leave=self.leave,
            watched=watched,
            fixed=self.fixed,
            known=known,
            owners=given.update.owners,
            elsewhere=state.stages.elsewhere,
        )
        state.marks, state.mark = self.gradients.trained.marks, self.gradients.mark
        if not self.gradients.parameters:
            raise ConfigError("track", sorted(state.objects), "no module with parameters that require a gradient", "Track model=... too.")
        kind = "native" if settings.reduction == "native" else "ordered"
        # Not in two levels where sums are checked: the check would blame the owner for another rank's partial sums.
        two_levels = settings.two_level_sums and not settings.verify.compute and not self.leave
        cores = settings.overlap_cores if watched and settings.threads_per_rank == 1 else math.inf
        self.reducer = self.sums(settings.shards, kind, two_levels=two_levels, overlap_cores=cores)
        self._norms: list[FlatNorms] = []
        self._split, self._split_of = SplitNorms((), ()), list[torch.nn.Parameter]()

    @property
    def useless(self) -> str:
        """Why the loop body's current computation does not count: this rank lacks data for it. Empty while it counts."""
        return ""

    @property
    def weights(self) -> list[torch.Tensor]:
        """The memory of the parameters that this rank holds between steps."""
        return list(self.gradients.parameters)

    @property
    def elements(self) -> list[torch.Tensor]:
        """The elements of parameters in that memory, which may have gaps."""
        return self.weights

    @property
    def spares_newcomers(self) -> bool:
        """Whether a rank can take a step without a shard of its own: not when a forward changes buffers of the model."""
        return self.gradients.buffers.constant

    @property
    def apart(self) -> str:
        """Why this rank cannot keep a part of a sharded state while it computes no shard; empty where it can."""
        if self.kept is None or not self.given.settings.spares:
            return ""
        return self.gradients.buffers.wants or self.kept.lacks

    @property
    def there(self) -> Collection[int] | None:
        """The shards whose gradients this rank has, of all that it adds up for others; None: it adds up its own shards alone.

        A shard counts in a view that begins within the step if it is there on all ranks.
        """
        return None

    def drop(self) -> None:
        """Drop the sums that this rank has made for others: ranks may differ in them."""

    def count(self, shards: Collection[int]) -> None:
        """These shards of the step count in the view that begins."""

    def begin(self, state: StateId) -> None:
        """This rank has loaded or built all of ``state``."""

    def join(self, group: Group) -> None:
        """Take steps with the ranks of ``group``, one column, from now on."""
        self.group, self._split_of = group, []

    # ---- compute -------------------------------------------------------------------------------------------------------------------------

    def begin_shard(self, shard: int) -> None:
        """Right before the forward of ``shard``."""

    def end_shard(self, shard: int, loss: float) -> None:
        """Its backward is over."""

    def repeat(self) -> None:
        """All ranks compute the step once more."""

    def reset(self) -> None:
        """Nothing of the present attempt remains."""

    def hold(self) -> None:
        """The group is gone or left. The shards that this rank has computed of the step stay."""

    # ---- reduce --------------------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all gradients that left this rank in the backward have arrived. Raises GroupBroken."""

    def split_norms(self) -> SplitNorms:
        """The norms of blocks that each rank sends beside the gradients: of the part that it alone adds up; none with a gradient scaler.

        With a spread state each rank sends them later, in its vote, if the step clips.
        """
        gradients = self.gradients
        if self._split_of is not gradients.parameters:
            beside = self.given.update.scaler is None and self.kept is None
            parts = self.reducer.parts(gradients.layout.meta) if beside else [[] for _ in range(self.group.size)]
            self._split, self._split_of = SplitNorms(parts, gradients.layout.extents), gradients.parameters
        return self._split

    def keep_norms(self, norms: Sequence[FlatNorms]) -> None:
        """Keep the norms of all blocks, in order. Empty: the mean has changed since."""
        self._norms = list(norms)

    @property
    def late(self) -> bool:
        """This rank is done with its shards, and chunks that move beside the step are still on their way to it or from it."""
        return self.kept is not None and self.kept.late

    def settle(self, divisor: float, *, late: bool) -> None:
        """Complete the sums for the step, which were divided by ``divisor``. Raises GroupBroken. ``late``: :attr:`late` of some rank."""

    # ---- vote ----------------------------------------------------------------------------------------------------------------------------

    def agree(self, norms: torch.Tensor) -> tuple[float, float]:
        """(the norm of the whole gradient, or NaN where it is not known; the factor that clips it), where no rank has the whole gradient.

        ``norms``: of each rank's :meth:`word`, by rank.
        """
        return math.nan, self.kept.agree(norms)

    def of_column(self, norms: torch.Tensor) -> torch.Tensor:
        """Where there are other columns, what this rank tells them of the norms that its column's ranks have said, by rank."""
        return NOTHING

    def word(self) -> OwnWord:
        """This rank's judgement of its sums. A gradient scaler handles infinite sums itself: it skips the update."""
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
    def stepping(self, *, turns: bool) -> Iterator[list[torch.Tensor]]:
        """Context of all changes that a step makes to the state, from this rank's sums. Gives the gradients for the optimizers.

        ``turns``: all ranks take the step together, so they may turn to another cut behind it.
        """
        gradients = self.gradients
        yield [flat[:extent] for flat, extent in zip(gradients.mean.flats, gradients.layout.extents, strict=True)]

    def step_of(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Context of one optimizer's step."""
        return contextlib.nullcontext()

    def clip(self, gradients: list[torch.Tensor]) -> None:
        """Clip the gradients of :meth:`stepping`. Call it after the scaler has unscaled them."""
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
        """Send other ranks the parts of the new state that they need, then call ``then``. After GroupBroken it is called once all have
        them."""
        then()

    def resume(self) -> None:
        """Make the sums that this rank has kept those of the current step, which others have taken."""
        self.kept.resume()

    def afterwards(self, then: Callable[[], None]) -> None:
        """Call ``then`` once this rank has all of the state of a step that it has taken later than others."""
        self.kept.afterwards(then)

    def meet(self, groups: Any, view: View) -> None:
        """Take steps in ``view`` from now on, with the ranks of ``groups``."""

    def assigned(self, ways: Ways | None, place: int) -> None:
        """The units of the step are assigned in the view that was joined, to this rank as the ``place``-th of its column."""

    def part(self) -> None:
        """This rank has left its view, and computes no shard now."""

    # ---- a view begins, where chunks of the state move -----------------------------------------------------------------------------------

    def moving(self) -> contextlib.AbstractContextManager[None]:
        """Context of all changes to the chunks that this rank holds."""
        return contextlib.nullcontext()

    def introduce(self, group: Group) -> None:
        """Exchange the facts that ranks need of each other before chunks are placed in a view. Raises GroupBroken."""

    def place(self, state: StateId, cut: StateCut, group: Group, asked: Sequence[tuple[int, ...]], *, inherited: bool) -> None:
        """This rank's chunks in the view of ``group`` are here, all at ``state``.

        Args:
            asked: by chunk, the ranks that this rank asks for it.
            inherited: no chunk has moved, so the step may go on.
        """

    def gather(self, group: Group, routes: Any) -> None:
        """Bring the parameters to all ranks that keep them whole. Raises GroupBroken."""

    # ---- between steps -------------------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """All ranks have taken a step, and the view stays: chunks go on moving beside the next one."""
        if self.kept is not None:
            self.kept.go_on()

    def readable(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which this rank, without the others, can read all parameters of the model."""
        return contextlib.nullcontext()

    def unread(self) -> contextlib.AbstractContextManager[Any]:
        """Context of code that may not read the parameters, where this rank does not hold them whole."""
        return contextlib.nullcontext()

    def digest(self, step: int) -> str:
        """The digest of the whole state after ``step`` steps. All ranks call it together and get the same. Raises GroupBroken."""
        return self.given.state.digest(step)

    def share(self) -> Share:
        """The part of a checkpoint that this rank writes, as one of the ranks of its view."""
        return WholeTensors(self.given.state, self.state_part)

    @property
    def state_part(self) -> StatePart:
        """Of the state, the part that is this rank's to write."""
        return StatePart(self.group.rank, self.group.size, self.group.rank, self.group.size)


MakeLayout = Callable[[LayoutInputs], StateLayout]


def layout_of(name: str) -> MakeLayout:
    """The layout class of this name in the table of layouts."""
    module, _, kind = LAYOUTS[name].where.partition(":")
    return cast(MakeLayout, getattr(import_module(module), kind))


def gradients_there(gradients: GradientBuffers, flats: Collection[int]) -> list[torch.Tensor]:
    """The gradients of the parameters in ``flats`` that have one."""
    found = zip(gradients.parameters, gradients.layout.gradients, strict=True)
    return [parameter.grad for parameter, place in found if parameter.grad is not None and place.flat in flats]


def all_finite(flats: Sequence[torch.Tensor]) -> bool:
    """Whether all elements of all buffers are finite."""
    return all(bool(torch.isfinite(flat).all()) for flat in flats)
