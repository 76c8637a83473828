"""A step where ranks compute a shard together: each column has its part of the state, whole or spread over its ranks.

Shards are summed within a column. A step is taken by all columns or by none. Before it, each rank says to all ranks of the view that it has
its sums (:mod:`fleet.protocol.vote`). A rank that has said so keeps its sums until it knows whether the step was taken. The norm of the
gradient is that of all columns. A parameter that all columns have whole counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.rank.fsdp.layout import FsdpLayout
from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.mesh.local_steps import on_local_memory
from actors.rank.mesh.parts import whole
from actors.rank.state.saving import StatePart
from actors.rank.step.clipping import SplitNorms, block_norms
from actors.rank.step.kept_sums import KeptSums
from actors.rank.step.layout import LayoutInputs, OwnWord, StateLayout, all_finite
from actors.rank.zero1.layout import Zero1Layout
from fleet.protocol.types import Coordinate, View, columns


class ComputesTogether(Protocol):
    """The ranks with which one rank computes, in whatever view. ``lost``: why what it got from them is of no use."""

    lost: str

    def meet(self, inside: Group | None) -> None:
        """Compute with these ranks from now on; None: with none."""


@dataclass
class _InView:
    """One rank's place in the present view.

    Attributes:
        group: the ranks with which it computes.
        first_column: it is of the first column, which writes what all columns have alike.
        rank: of the view, which has ``size`` ranks. ``firsts``: the first rank of each column, by coordinate.
        common: the square of the norm of what all columns have alike of the gradient.
    """

    group: ComputesTogether
    first_column: bool
    rank: int = 0
    size: int = 1
    firsts: Sequence[int] = (0,)
    common: float = 0.0


class InColumns(StateLayout):
    """One rank's state, of its column's part. A class that has this one as its first base says where that part lies.

    Args:
        group: the ranks with which this one computes; it stands at ``coordinate`` there.
    """

    def __init__(self, given: LayoutInputs, group: ComputesTogether, coordinate: Coordinate) -> None:
        super().__init__(given)
        self._at = _InView(group, not any(place for _, place in coordinate))

    def meet(self, groups: ViewGroups, view: View) -> None:
        """Compute in ``view`` from now on, with the ranks of ``groups``."""
        self._at.group.meet(groups.together)
        self._at.rank, self._at.size = groups.whole.rank, groups.whole.size
        self._at.firsts = [ranks[0] for _, ranks in sorted(columns(view.members).items())]

    def part(self) -> None:
        """The ranks with which this one computes are left: it answers their collectives by itself."""
        self._at.group.meet(None)

    @property
    def useless(self) -> str:
        return self._at.group.lost or super().useless

    def flush(self) -> None:
        """Raises GroupBroken: a shard of this rank was not computed, as its group is broken."""
        self._check_group()
        super().flush()

    def _check_group(self) -> None:
        """Raises GroupBroken: what this rank has got from its group is of no use."""
        if self._at.group.lost:
            raise GroupBroken(self._at.group.lost, self.group.generation)

    def split_norms(self) -> SplitNorms:
        return SplitNorms([()] * self._at.size, self.gradients.layout.extents)

    def squares(self, blocks: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The square of the norm of what this column alone has of the gradient, as one number. It keeps the rest for :meth:`agree`.

        ``blocks``: by flat buffer, the norms of its blocks. They are added up in order, so that the sum is the same at any number of
        replicas.
        """
        found = {flat: float((norms**2).sum()) for flat, norms in sorted(blocks.items())}
        divided = self.gradients.layout.divided
        self._at.common = sum(square for flat, square in found.items() if flat not in divided)
        own = sum(square for flat, square in found.items() if flat in divided)
        return torch.tensor([own], dtype=torch.float64, device="cpu")

    def square_of(self, norms: torch.Tensor) -> float:
        """The square of the norm of the whole gradient. ``norms``: by view rank, its :meth:`squares`."""
        return self._at.common + sum(float(norms[place, 0]) for place in self._at.firsts)

    def agree(self, norms: torch.Tensor) -> tuple[float, float]:
        """(the norm of the whole gradient, the factor that clips it)."""
        norm = math.sqrt(self.square_of(norms))
        clipped = next(self.given.update.clipped, None)
        return norm, 1.0 if clipped is None else min(1.0, clipped.norm / (norm + 1e-6))

    @property
    def state_part(self) -> StatePart:
        return StatePart(self._at.rank, self._at.size, self.group.rank, self.group.size, self._at.first_column)


class ColumnLayout(InColumns):
    """Each rank has its column's part whole: the ranks of a column are replicas of each other."""

    def __init__(self, given: LayoutInputs, group: ComputesTogether, coordinate: Coordinate) -> None:
        super().__init__(given, group, coordinate)
        self.kept_sums = KeptSums(self.gradients, given.vote)

    # ---- sums of a step that others may have taken ---------------------------------------------------------------------------------------

    def hold(self) -> None:
        self.kept_sums.hold()

    def reset(self) -> None:
        self.kept_sums.forget()

    def resume(self) -> None:
        self.kept_sums.resume()

    # ---- vote ----------------------------------------------------------------------------------------------------------------------------

    def word(self) -> OwnWord:
        """This rank's judgement of its sums, with the numbers of :meth:`squares`."""
        flats, layout, unscaling = self.gradients.mean.flats, self.gradients.layout, self.given.update.unscaling
        parts = {flat: flats[flat][: layout.extents[flat]] for flat in layout.flats_of(self.given.update.taken)}
        rest = [flat[extent:] for flat, extent in zip(flats, layout.extents, strict=True)]
        norms = self.squares({flat: block_norms(part if unscaling == 1.0 else part * unscaling) for flat, part in parts.items()})
        finite = (math.isfinite(float(norms.sum()) + self._at.common) or all_finite(list(parts.values()))) and all_finite(rest)
        return OwnWord(finite, norms=norms)

    def step_of(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return on_local_memory(optimizer)

    # ---- publish -------------------------------------------------------------------------------------------------------------------------

    def afterwards(self, then: Callable[[], None]) -> None:
        then()

    # ---- the whole state -----------------------------------------------------------------------------------------------------------------

    def digest(self, step: int) -> str:
        state = self.given.state
        found = {name: whole(tracked.state_dict()) for name, tracked in state.objects.items()}
        self._check_group()
        return state.digest(step, found)


class SpreadInColumns(InColumns):
    """A column's part is spread over the ranks of the column, in chunks."""

    def of_column(self, norms: torch.Tensor) -> torch.Tensor:
        return self.squares(self.kept.blocks(norms))

    def agree(self, norms: torch.Tensor) -> tuple[float, float]:
        norm, factor = super().agree(norms)
        return (norm, factor) if self.kept.clips else (math.nan, 1.0)

    def digest(self, step: int) -> str:
        state, kept = self.given.state, self.kept
        apart = state.spread()
        rest = {name: one for name, one in state.objects.items() if name not in apart and one not in kept.chunks.tracked}
        found: str = kept.digest(self.group, step, {name: whole(one.state_dict()) for name, one in rest.items()})
        self._check_group()
        return found


class Zero1ColumnLayout(SpreadInColumns, Zero1Layout):
    """The optimizer's state is spread. Each rank has the parameters of its column's part whole."""


class FsdpColumnLayout(SpreadInColumns, FsdpLayout):
    """The parameters are spread, too."""


IN_COLUMNS = {"none": ColumnLayout, "zero1": Zero1ColumnLayout, "fsdp": FsdpColumnLayout}
"""By ``optimizer_sharding``."""
