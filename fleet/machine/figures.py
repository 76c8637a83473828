"""Figures of a step that ranks have computed shard by shard: one number each, for any assignment of shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from fleet.protocol.events import Logged
from fleet.protocol.types import StateId

KEPT = 16
"""Number of steps that wait for missing values of ranks. A lost rank never sends its values."""


@dataclass(slots=True)
class _Step:
    weights: dict[int, float] = field(default_factory=dict)
    values: dict[str, dict[int, float]] = field(default_factory=dict)


class ShardFigures:
    """Collects the ranks' values by shard of a step. Pure.

    Args:
        shards: batch shards of the run.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._steps: dict[StateId, _Step] = {}

    def receive(self, event: Logged) -> Iterator[tuple[str, float]]:
        """(name, weighted mean over shards) of each figure of the step, once the values of all its shards are there.

        If only some shards have a figure, it is the mean over these. A figure that is not finite in some shard is left out.
        """
        step = self._steps.setdefault(event.state, _Step())
        step.weights.update(zip(event.shards, event.weights, strict=True))
        for name, values in event.figures:
            found = ((shard, value) for shard, value in zip(event.shards, values, strict=True) if value is not None)
            step.values.setdefault(name, {}).update(found)
        if len(step.weights) == self._shards:
            del self._steps[event.state]
            yield from self._reduced(step)
        for state in sorted(self._steps)[:-KEPT]:
            del self._steps[state]

    @staticmethod
    def _reduced(step: _Step) -> Iterator[tuple[str, float]]:
        for name, values in step.values.items():
            found = [(step.weights[shard], value) for shard, value in sorted(values.items()) if step.weights[shard] > 0]
            if len({value for _, value in found}) == 1:
                mean = found[0][1]
            elif all(math.isfinite(value) for _, value in found) and found:
                mean = math.fsum(weight * value for weight, value in found) / math.fsum(weight for weight, _ in found)
            else:
                continue
            if math.isfinite(mean):
                yield name, mean
