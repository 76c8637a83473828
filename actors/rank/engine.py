"""One rank's arithmetic of a step: gradients of its shards, their fixed-order mean, and the one mutation of the state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from actors.rank.gradients import GradientBuffers
from actors.rank.process_group import Group
from actors.rank.recorder import Recorder
from actors.rank.reduction import Reducer, SideChannel
from actors.rank.state import TrackedState
from fleet.config import RunSettings
from fleet.errors import ConfigError
from fleet.records import COMM, STRAGGLER
from fleet.types import View

FLAGS = 3
"""Numbers that each rank sends beside the gradients, before its shards' losses: proposal, checkpoint request, time of arrival."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reduction told every rank alike.

    ``offers`` are all ranks' (proposal, checkpoint request); ``loss`` the mean over shards; ``culprit`` the first shard whose loss is not
    finite, -1 when only their gradient is not, None when all is well, and ``why`` says so in words.
    """

    offers: list[tuple[int, int]]
    loss: float
    culprit: int | None
    why: str = ""


class Engine:
    """Computes, reduces and applies steps of the tracked objects.

    Args:
        state: of which the modules are trained by its one optimizer; a learning-rate scheduler and a gradient scaler are stepped with it.
        clip_norm: the gradient's norm is clipped to this.
    """

    def __init__(self, state: TrackedState, settings: RunSettings, recorder: Recorder, clip_norm: float | None) -> None:
        self.state, self._recorder, self._clip_norm = state, recorder, clip_norm
        self._shards = settings.shards
        modules = {name: o for name, o in state.objects.items() if isinstance(o, torch.nn.Module)}
        self._optimizer = _only(state, torch.optim.Optimizer, "optimizer")
        self._schedulers = [o for o in state.objects.values() if isinstance(o, torch.optim.lr_scheduler.LRScheduler)]
        self._scaler = next((o for o in state.objects.values() if isinstance(o, torch.amp.GradScaler)), None)
        self._gradients = GradientBuffers(modules, settings.shards)
        if not self._gradients.parameters:
            raise ConfigError("track", sorted(state.objects), "no module with parameters that require a gradient", "Track model=... too.")
        self.device = self._gradients.parameters[0].device
        self._reducer = Reducer(settings.shards, "native" if settings.reduction == "native" else "ordered")
        self._side: SideChannel | None = None
        self._ranges: tuple[tuple[int, int], ...] = ()
        self._rank = 0
        self._begun = False

    def seat(self, group: Group, view: View, rank: int) -> None:
        """Compute with this group from now on."""
        self._ranges, self._rank = view.ranges, rank
        self._reducer.bind(group, view.ranges)
        self._most = max(stop - start for start, stop in view.ranges)
        self._side = SideChannel(group, FLAGS + self._most)
        self.reset()

    @property
    def my_shards(self) -> range:
        return range(*self._ranges[self._rank])

    def begin_shard(self) -> None:
        if not self._begun:
            self._gradients.begin_step(*self._ranges[self._rank])
            self._begun = True
        self._gradients.begin_shard()

    def end_shard(self, shard: int) -> None:
        self._gradients.end_shard(shard)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def reset(self) -> None:
        """Nothing of the present attempt remains."""
        self._gradients.abandon()
        self._begun = False

    def reduce(self, losses: dict[int, float], offer: tuple[int, int]) -> Outcome:
        """Exchange gradients and a few numbers with all ranks. Raises GroupBroken."""
        assert self._side is not None
        arrived_us = self._recorder.switch(STRAGGLER)
        mine = [losses[shard] for shard in self.my_shards]
        self._side.start([*offer, arrived_us, *mine, *[0.0] * (self._most - len(mine))])
        self._gradients.reduce(self._reducer)
        numbers = self._side.wait().tolist()
        self._recorder.switch(COMM, min(self._recorder.now_us(), int(max(row[2] for row in numbers))))
        by_shard = [row[FLAGS + i] for row, (start, stop) in zip(numbers, self._ranges, strict=True) for i in range(stop - start)]
        culprit, why = self._suspect(by_shard)
        return Outcome([(int(row[0]), int(row[1])) for row in numbers], math.fsum(by_shard) / self._shards, culprit, why)

    def _suspect(self, losses: list[float]) -> tuple[int | None, str]:
        """With a gradient scaler, infinite gradients are its business: it skips the update and lowers its scale."""
        for shard, loss in enumerate(losses):
            if not math.isfinite(loss):
                return shard, f"its loss is {loss}"
        if self._scaler is None and not self._finite():
            return -1, "the gradient is not finite, though every loss is"
        return None, ""

    def _finite(self) -> bool:
        total = torch.stack([flat.sum() for flat in self._gradients.mean_flats if flat.is_floating_point()])
        return bool(torch.isfinite(total).all()) or all(bool(torch.isfinite(flat).all()) for flat in self._gradients.mean_flats)

    def apply(self) -> None:
        """Clip, step optimizer, scaler and schedulers, give buffers their new values. The state is dirty meanwhile."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._gradients.parameters, self._clip_norm)
        if self._scaler is not None:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self._gradients.commit()
        self._begun = False


def _only(state: TrackedState, kind: type, name: str) -> Any:
    found = [o for o in state.objects.values() if isinstance(o, kind)]
    if len(found) != 1:
        raise ConfigError("track", sorted(state.objects), f"{len(found)} of its objects are an {name}", f"Track exactly one {name}.")
    return found[0]
