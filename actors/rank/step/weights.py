"""Weights of shards: ``step.backward(loss, weight=n)``.

The step's gradient is the sum of n / N times each shard's, where N is the sum of all n. What a shard's backward begins with is its loss
times n over a unit, the power of two below n: gradients of a backward stay as large as they are without weights. The unit is multiplied in,
without rounding, where the gradient is added to the sums of its rank; N divides the sum over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from fleet.errors import LoopError

NONE = -1.0
"""In the place of a weight: the loop gives none."""


class ShardWeights:
    """Of the shards that one rank has computed of a step.

    With one shard the weight of its first backward is the unit, and 1 is told: its gradient has the bits of a loss without a weight.

    Attributes:
        unit: of the shard at hand.
    """

    def __init__(self, shards: int) -> None:
        self._single = shards == 1
        self._of: dict[int, float] = {}
        self.begin()

    def begin(self) -> None:
        """A shard begins."""
        self._given: list[float | None] = []
        self.unit = 1.0

    def add(self, weight: float | None) -> float:
        """A backward of the shard at hand: what its loss is multiplied with. Raises LoopError."""
        if weight is not None and not (math.isfinite(weight) and weight >= 0):
            raise LoopError(f"step.backward(loss, weight={weight}): a weight is a finite number, and at least 0")
        if self._given and (self._given[0] is None) != (weight is None):
            raise LoopError("step.backward() was called with weight= and without it for one batch: give all of them a weight, or none")
        first = not any(self._given)
        self._given.append(weight)
        if weight is None or not weight:
            return 1.0 if weight is None else 0.0
        if first:
            self.unit = weight if self._single else 2.0 ** math.floor(math.log2(weight))
        return weight / self.unit

    @property
    def given(self) -> float | None:
        """The shard's weight so far; None where it has none."""
        given = [weight for weight in self._given if weight is not None]
        return math.fsum(given) if given else None

    def end(self, shard: int) -> tuple[float, float]:
        """(what its gradients, what its changes of buffers are multiplied with) as they are added to the sums."""
        weight = self.given
        if weight is None:
            self._of[shard] = NONE
            return 1.0, 1.0
        if self._single:
            self._of[shard] = weight / self.unit
            return 1.0, self._of[shard]
        self._of[shard] = weight
        return self.unit, weight

    def of(self, shards: Sequence[int]) -> list[float]:
        """What to tell the other ranks."""
        return [self._of[shard] for shard in shards]

    def taken(self) -> dict[int, float]:
        """By shard, of the step that is over; 1 where none has a weight."""
        found = {shard: 1.0 if weight == NONE else weight for shard, weight in self._of.items()}
        self.forget()
        return found

    def keep(self, shards: Collection[int]) -> None:
        self._of = {shard: weight for shard, weight in self._of.items() if shard in shards}

    def forget(self) -> None:
        """The step is over."""
        self._of = {}
        self.begin()


def agreed(weights: Sequence[float]) -> tuple[float, ...]:
    """What all ranks have told, by shard; () where no shard has a weight. Raises LoopError where only some have one."""
    without = [shard for shard, weight in enumerate(weights) if weight == NONE]
    if not without:
        return tuple(weights)
    if len(without) < len(weights):
        which = next(shard for shard, weight in enumerate(weights) if weight != NONE)
        raise LoopError(f"step.backward() has a weight in shard {which}, and none in shard {without[0]}: give all shards one, or none")
    return ()


def divisor(weights: Sequence[float]) -> float:
    """By what to divide the sum over shards, once it was divided by their number. 0 where nothing has a weight."""
    return math.fsum(weights) / len(weights) if weights else 1.0


def mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """Of one value for each shard. Not a number where nothing has a weight."""
    if not weights:
        return math.fsum(values) / len(values)
    total = math.fsum(weights)
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True) if weight) / total if total else math.nan
