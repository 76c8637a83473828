"""What changes the gradients of a shard on purpose, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Change = Callable[[Sequence[torch.Tensor]], object]


class Injections:
    """Of one rank."""

    def __init__(self) -> None:
        self._waiting: list[Change] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, change: Change) -> None:
        """``change`` is given the gradients of a shard, once, between its backward and its sum: the first one that begins, or is at hand,
        and whose gradients have not been sent meanwhile. From any thread."""
        self._waiting.append(change)

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """These are a shard's, and none has been sent."""
        if self._waiting and gradients:
            self._waiting.pop(0)(gradients)
