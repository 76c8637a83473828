"""What changes the state by a step: the optimizer, the schedulers and the scaler that are tracked, and to what the gradient is clipped."""

from __future__ import annotations

import math
from typing import Any

import torch

from actors.rank.state.tracked import TrackedState
from fleet.errors import ConfigError


class Update:
    """Of one rank.

    Args:
        clip_norm: the gradient's norm is clipped to this; None: it is not.

    Attributes:
        rate: the learning rate of the first group in the step that was taken last.
    """

    def __init__(self, state: TrackedState, clip_norm: float | None) -> None:
        objects = state.objects.values()
        self.optimizer = _only(state, torch.optim.Optimizer, "optimizer")
        self.schedulers = [one for one in objects if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]
        self.scaler = next((one for one in objects if isinstance(one, torch.amp.GradScaler)), None)
        self.clip_norm, self.rate = clip_norm, math.nan

    @property
    def unscaling(self) -> float:
        """By which a gradient scaler multiplies the gradient before it is clipped, rounded as it does."""
        return 1.0 if self.scaler is None else float(torch.tensor(self.scaler.get_scale(), device="cpu").double().reciprocal().float())

    @property
    def moments(self) -> list[torch.Tensor]:
        """The tensors of the optimizer's state."""
        states = self.optimizer.state.values()
        return [value for one in states for value in one.values() if isinstance(value, torch.Tensor) and value.dim()]


def _only(state: TrackedState, kind: type, name: str) -> Any:
    found = [one for one in state.objects.values() if isinstance(one, kind)]
    if len(found) != 1:
        raise ConfigError(
            "track",
            sorted(state.objects),
            f"{len(found)} of its objects are an {name}",
            f"Track exactly one {name}; its groups may have other options.",
        )
    return found[0]
