"""The gradients of a rank's last shard: added to the sums and given to the exchange bucket by bucket, while the backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from actors.rank.step.early import Early
from actors.rank.step.habits import BucketOrder, Countdown
from actors.rank.step.sums import Coming

Collect = Callable[[Sequence[torch.Tensor | None], Sequence[torch.Tensor], bool], None]


class Ahead:
    """This rank's last shard in a step.

    Where the shard's gradient gets buffers of its own, ``.grad`` becomes a view of them: it is not held twice.

    Args:
        order: of the exchange; ``expected`` are the parameters whose gradients will come.
        into: the buffers for the shard's gradients; with ``joined`` they hold a sum already. ``coming``: the additions to the sums that
            follow.
        out: where the mean will be.
        early: the exchange.
        collect: copies or adds gradients to their places.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        order: BucketOrder,
        expected: Collection[int],
        into: Any,
        joined: bool,
        coming: Coming[Any],
        out: Any,
        early: Early,
        collect: Collect,
    ) -> None:
        self.into, self.coming, self.out, self.early = into, coming, out, early
        self._parameters, self._order, self._joined, self._collect = parameters, order, joined, collect
        self._countdown = Countdown(order, expected)
        self._shared = not joined and all(left is not into for left, _ in coming.pairs)
        self._given = 0
        self._marks: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._written = [flat._version for flat in into.flats]
        self._changed = False

    def came(self, parameter: int) -> None:
        """A backward, which still runs, has made the gradient of ``parameter``."""
        self._changed |= parameter in self._marks
        self._countdown.came(parameter)
        while self._given < self._countdown.complete and not self._changed:
            self._give()

    def finish(self) -> bool:
        """The shard is over: give the buckets that are left. False: a gradient was changed after it was given."""
        while self._given < len(self._order.portions) and not self._changed:
            self._give()
        return not self._changed and self._as_given()

    def _give(self) -> None:
        """Give the next bucket to the exchange."""
        parameters, spans = self._order.portions[self._given]
        if self._shared and self._written != [flat._version for flat in self.into.flats]:
            self._changed = True
            return
        with torch.no_grad():
            places = [self.into.gradients[number] for number in parameters]
            self._collect([self._parameters[number].grad for number in parameters], places, self._joined)
            for span in spans:
                self.coming.add_up(*span)
        for number, place in zip(parameters, places, strict=True):
            self._mark(number, place)
        self._written = [flat._version for flat in self.into.flats]
        self._given += 1
        self.early.give()

    def _mark(self, number: int, place: torch.Tensor) -> None:
        gradient = self._parameters[number].grad
        if gradient is not None and self._shared:
            self._parameters[number].grad = gradient = place
        self._marks[number] = gradient, 0 if gradient is None or self._shared else gradient._version

    def _as_given(self) -> bool:
        """Whether all gradients are as they were when they were collected."""
        if self._shared and self._written != [flat._version for flat in self.into.flats]:
            return False
        now = ((self._parameters[number].grad, mark) for number, mark in self._marks.items())
        return all(found is gradient and (found is None or self._shared or found._version == version) for found, (gradient, version) in now)
