"""The model of simulated ranks: its "weights" are a hash chain, so a lost, doubled or mixed-up contribution shows in all later weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.simulation.rng import derive_seed

POISON = -1
"""Weights that are half written. A value computed from them never equals a right one."""

SPOILED = -2
"""The contribution of a shard whose gradient is not finite."""


def gradient(weights: int, step: int, shard: int) -> int:
    """The contribution of one shard to one step: a pure function of the state and of (step, shard)."""
    return hash((weights, step, shard, 17))


def updated(weights: int, contributions: Mapping[int, int], shards: int) -> int:
    """The weights after a step; poison when a contribution is missing or was made from poison."""
    if weights == POISON or len(contributions) != shards:
        return POISON
    return hash((weights, tuple(contributions[shard] for shard in range(shards))))


@dataclass
class Chain:
    """The fault-free history: ``weights(k)`` after k steps."""

    seed: int
    shards: int
    _known: list[int] = field(default_factory=list)

    def weights(self, step: int) -> int:
        if not self._known:
            self._known.append(derive_seed(self.seed, "weights"))
        while len(self._known) <= step:
            k, last = len(self._known) - 1, self._known[-1]
            self._known.append(updated(last, {s: gradient(last, k, s) for s in range(self.shards)}, self.shards))
        return self._known[step]
