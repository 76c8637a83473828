"""Weights of shards: ``step.backward(loss, weight=n)``.

The step's gradient is the sum over shards of n / N times the shard's gradient, where N is the sum of all n. A shard's backward begins with
its loss times n over a unit, the power of two at or below n. So its gradients stay about as large as without weights. The rank multiplies
by the unit, without rounding, when it adds the gradient to its sums. N divides the sum over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from fleet.errors import LoopError

NONE = -1.0
"""Sent in the place of a weight: the loop gives none."""


class ShardWeights:
    """The weights of the shards that one rank has computed of a step.

    In a run of one shard the weight of its first backward is the unit, and the rank sends 1. So its gradient has the bits of a loss without
    a weight.

    Attributes:
        unit: of the current shard.
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
        """The factor of the loss in a backward of the current shard. Raises LoopError."""
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
        """(factor of the shard's gradients, factor of its changes of buffers) as they are added to the sums."""
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
        """The weights of ``shards``, for the other ranks."""
        return [self._of[shard] for shard in shards]

    def taken(self) -> dict[int, float]:
        """The weights of the step that is over, by shard; 1 where the loop gave none."""
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
    """The weights of all shards, from all ranks' numbers; () where no shard has one. Raises LoopError where only some have one."""
    without = [shard for shard, weight in enumerate(weights) if weight == NONE]
    if not without:
        return tuple(weights)
    if len(without) < len(weights):
        which = next(shard for shard, weight in enumerate(weights) if weight != NONE)
        raise LoopError(f"step.backward() has a weight in shard {which}, and none in shard {without[0]}: give all shards one, or none")
    return ()


def divisor(weights: Sequence[float]) -> float:
    """The divisor of the mean over shards that gives the weighted mean. 1 without weights, 0 where all weights are 0."""
    return math.fsum(weights) / len(weights) if weights else 1.0


def mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean of one value for each shard. NaN where all weights are 0."""
    if not weights:
        return math.fsum(values) / len(values)
    total = math.fsum(weights)
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True) if weight) / total if total else math.nan
