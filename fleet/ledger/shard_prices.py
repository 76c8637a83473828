"""The price of each number of shards: time and memory of a rank's part of a step. Pure; see ``fleet doctor --shards``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FACTORS = (1, 2, 4, 8, 16)
"""Shards of each rank to try."""


@dataclass(frozen=True, slots=True)
class ShardPrice:
    """The price of a number of shards.

    Attributes:
        shards: of a step, of all ranks together; ``per_rank``: of each rank; ``samples``: in one shard.
        step_s: median seconds of a rank's part of a step; ``times``: that over the time with the fewest shards.
        first_pass_s: median seconds of it that compute representations for ``step.gather``, ahead of the loss.
        peak_bytes: peak memory of the process; ``step_bytes``: the part of it since its first step began.
    """

    shards: int
    per_rank: int
    samples: int
    step_s: float
    times: float
    first_pass_s: float
    peak_bytes: int
    step_bytes: int


def candidates(world: int, batch_size: int) -> list[int]:
    """Numbers of shards to try: multiples of ``world`` that divide the batch, in order."""
    return [world * factor for factor in FACTORS if batch_size % (world * factor) == 0]


def prices(world: int, batch_size: int, measured: Sequence[tuple[int, Sequence[float], Sequence[float], int, int]]) -> list[ShardPrice]:
    """The price of each (shards, seconds of its steps, of their first passes, peak bytes, bytes before the first step), in order."""
    medians = {shards: statistics.median(seconds) for shards, seconds, *_ in measured}
    least = medians[min(medians)] if medians else 0.0
    return [
        ShardPrice(
            shards, shards // world, batch_size // shards, medians[shards], medians[shards] / least if least else 1.0,
            statistics.median(first), peak, max(0, peak - before),
        )
        for shards, _, first, peak, before in measured
    ]  # fmt: skip
