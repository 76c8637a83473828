"""Losses and gradients that are finite, and far from all that came before: a bit that flipped high up in a number, or a broken sample.

Each rank sends, beside its gradients, how large a loss and a gradient may be, by what it has seen of the last steps. The least of all
ranks' limits holds for all, so that all decide alike, and who has just come and has seen nothing does not have to be told.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from fleet.protocol.vote import Doubt

WIDTH = 2
"""Numbers that each rank sends: limits of a shard's loss, and of the gradient's norm."""

KEPT, LEAST = 64, 16
"""Steps that are remembered, and how many there have to be; after a jump that was none of the hardware's so many steps are not judged."""

LEAST_SPREAD = 0.1
"""Share of the median that the spread is taken for at least: a loss that hardly moves may move a little."""


def judged(losses: Sequence[float], counted: Sequence[bool], limit: float) -> tuple[float, Doubt | None]:
    """The largest loss of those shards that count, and what is wrong with the losses: one above ``limit`` is not usual."""
    largest = max((loss for loss, counts in zip(losses, counted, strict=True) if counts), default=0.0)
    for shard, (loss, counts) in enumerate(zip(losses, counted, strict=True)):
        if counts and not math.isfinite(loss):
            return largest, Doubt(shard, f"its loss is {loss}", True)
    if largest > limit:
        return largest, Doubt(losses.index(largest), f"its loss is {largest:.4g}, and up to {limit:.4g} is usual", False)
    return largest, None


class Jumps:
    """What the last steps were like.

    Args:
        spreads: a value is too large from so many spreads (median absolute deviations, as of a normal's) above the median on; 0: never.
    """

    def __init__(self, spreads: float) -> None:
        self.width, self._spreads = WIDTH if spreads else 0, spreads
        self._losses: deque[float] = deque(maxlen=KEPT)
        self._norms: deque[float] = deque(maxlen=KEPT)
        self._lenient = 0

    def limits(self) -> list[float]:
        """The numbers to send with the gradients."""
        if not self.width:
            return []
        return [self._limit(values) for values in (self._losses, self._norms)]

    def _limit(self, values: Sequence[float]) -> float:
        if self._lenient or len(values) < LEAST:
            return math.inf
        median = statistics.median(values)
        spread = 1.4826 * statistics.median(abs(value - median) for value in values)
        return median + self._spreads * max(spread, LEAST_SPREAD * abs(median))

    def seen(self, loss: float, norm: float) -> None:
        """A step was committed, with this largest loss of a shard, and this norm of the gradient (NaN: not known)."""
        if self.width:
            self._lenient = max(0, self._lenient - 1)
            self._losses.append(loss)
            if math.isfinite(norm):
                self._norms.append(norm)

    def accept(self) -> None:
        """The step at hand is computed again: whatever comes out now is what the model and the data give."""
        self._lenient = LEAST

    def begin(self) -> None:
        """Another history begins."""
        self._losses.clear()
        self._norms.clear()
