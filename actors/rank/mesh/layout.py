"""A step where ranks compute a shard together: each column has the whole state of its coordinate, as its ranks are replicas of each other.

Shards are summed within a column. A step is taken by all columns or by none. Before it, each rank says to all ranks of the view that it has
its sums (:mod:`fleet.protocol.vote`). A rank that has said so keeps its sums until it knows whether the step was taken. The norm of the
gradient is that of all columns. A parameter that all columns have whole counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from actors.rank.membership.process_group import GroupBroken
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.mesh.parts import whole
from actors.rank.mesh.saving import ColumnTensors
from actors.rank.mesh.torch_group import TensorGroup
from actors.rank.state.saving import Share
from actors.rank.step.clipping import SplitNorms, block_norms, clip
from actors.rank.step.kept_sums import KeptSums
from actors.rank.step.layout import LayoutInputs, OwnWord, StateLayout, all_finite
from fleet.protocol.chunks import WHOLE, Claim
from fleet.protocol.types import Coordinate, StateId, View, columns


class ColumnLayout(StateLayout):
    """One rank's state."""

    spares_newcomers = False

    def __init__(self, given: LayoutInputs, group: TensorGroup, coordinate: Coordinate) -> None:
        super().__init__(given)
        self._together, self._coordinate = group, coordinate
        self._place, self._ranks, self._firsts = 0, 1, [0]
        self.kept_sums = KeptSums(self.gradients, given.vote)
        self._common = 0.0

    def meet(self, groups: ViewGroups, view: View) -> None:
        """Compute in ``view`` from now on, with the ranks of ``groups``."""
        self._together.meet(groups.together)
        self._place, self._ranks = groups.whole.rank, groups.whole.size
        self._firsts = [column[0] for column in columns(view.members).values()]

    def part(self) -> None:
        """The ranks with which this one computes are left: it answers their collectives by itself."""
        self._together.meet(None)

    # ---- compute -------------------------------------------------------------------------------------------------------------------------

    @property
    def useless(self) -> str:
        return self._together.lost

    def flush(self) -> None:
        """Raises GroupBroken: a shard of this rank was not computed, as its group is broken."""
        if self._together.lost:
            raise GroupBroken(self._together.lost, self.group.generation)

    # ---- sums of a step that others may have taken ---------------------------------------------------------------------------------------

    def hold(self) -> None:
        self.kept_sums.hold()

    def reset(self) -> None:
        self.kept_sums.forget()

    def resume(self) -> None:
        self.kept_sums.resume()

    def claim(self) -> Claim:
        """This rank's claim when a view begins."""
        at = self.given.duties.at
        return self.given.vote.claim(at, (WHOLE,) if at is not None else (), (), complete=True, node=0)

    def begin(self, state: StateId) -> None:
        self.given.duties.at = state

    def lose(self) -> None:
        """This rank's state is of no use: it receives another."""
        self.given.duties.at = None

    # ---- vote ----------------------------------------------------------------------------------------------------------------------------

    def split_norms(self) -> SplitNorms:
        return SplitNorms([()] * self._ranks, self.gradients.layout.extents)

    def word(self) -> OwnWord:
        """This rank's judgement of its sums; ``norms``: the square of the norm of what it alone has of the gradient."""
        flats, layout, unscaling = self.gradients.mean.flats, self.gradients.layout, self.given.update.unscaling
        stepping = layout.flats_of(self.given.update.taken)
        parts = {flat: flats[flat][: layout.extents[flat]] for flat in stepping}
        rest = [flat[extent:] for flat, extent in zip(flats, layout.extents, strict=True)]
        squares = {flat: _square(part if unscaling == 1.0 else part * unscaling) for flat, part in parts.items()}
        divided = sum(square for flat, square in squares.items() if flat in layout.divided)
        self._common = sum(square for flat, square in squares.items() if flat not in layout.divided)
        finite = (math.isfinite(divided + self._common) or all_finite(list(parts.values()))) and all_finite(rest)
        return OwnWord(finite, norms=torch.tensor([divided], dtype=torch.float64, device="cpu"))

    def agree(self, norms: torch.Tensor) -> tuple[float, float]:
        """(the norm of the whole gradient, the factor that clips it)."""
        norm = math.sqrt(self._common + sum(float(norms[place, 0]) for place in self._firsts))
        clipped = next(self.given.update.clipped, None)
        return norm, 1.0 if clipped is None else min(1.0, clipped.norm / (norm + 1e-6))

    # ---- apply and publish ---------------------------------------------------------------------------------------------------------------

    def clip(self, gradients: list[torch.Tensor]) -> None:
        clip(gradients, self.given.vote.factor)

    def afterwards(self, then: Callable[[], None]) -> None:
        then()

    # ---- the whole state -----------------------------------------------------------------------------------------------------------------

    def digest(self, step: int) -> str:
        state = self.given.state
        found = {name: whole(tracked.state_dict()) for name, tracked in state.objects.items()}
        self.flush()
        return state.digest(step, found)

    def share(self) -> Share:
        return ColumnTensors(self.given.state, self._coordinate, self.group.rank, self.group.size, self._place, self._ranks)


def _square(part: torch.Tensor) -> float:
    """The square of a stretch's norm: its blocks are added up in order, so that it is the same at any number of replicas."""
    return float((block_norms(part) ** 2).sum())
