"""Changes of a shard's gradients on purpose, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Change = Callable[[Sequence[torch.Tensor]], object]


class Injections:
    """The changes that one rank has yet to make."""

    def __init__(self) -> None:
        self._waiting: list[Change] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, change: Change) -> None:
        """Call ``change`` once with the gradients of a shard, between its backward and its sum. From any thread.

        It is the current or the next shard whose gradients are not sent during its backward.
        """
        self._waiting.append(change)

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Make the next change to a shard's ``gradients``, none of which has been sent."""
        if self._waiting and gradients:
            self._waiting.pop(0)(gradients)
