"""Losses and gradients that are finite and far above all earlier ones: a high bit of a number has flipped, or a sample is broken.

Beside its gradients each rank sends limits for a loss and a gradient norm, from the last steps that it has seen. The least of all ranks'
limits holds for all, so all ranks decide alike. A rank that has just joined has seen no steps, and sends infinity.
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
"""How many steps a rank remembers, and how many it needs for a limit. ``LEAST`` steps are not judged after a jump that no fault caused."""

LEAST_SPREAD = 0.1
"""The least spread, as a share of the median: a loss that hardly moves may move a little."""


def judged(losses: Sequence[float], counted: Sequence[bool], limit: float) -> tuple[float, Doubt | None]:
    """(the largest loss of the shards that count, a doubt about the losses or None). A loss above ``limit`` is not usual."""
    largest = max((loss for loss, counts in zip(losses, counted, strict=True) if counts), default=0.0)
    for shard, (loss, counts) in enumerate(zip(losses, counted, strict=True)):
        if counts and not math.isfinite(loss):
            return largest, Doubt(shard, f"its loss is {loss}", True)
    if largest > limit:
        return largest, Doubt(losses.index(largest), f"its loss is {largest:.4g}, and up to {limit:.4g} is usual", False)
    return largest, None


class Jumps:
    """Losses and gradient norms of the last steps.

    Args:
        spreads: a value is too large when it is so many spreads above the median; 0: never. A spread is 1.4826 median absolute deviations.
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
        """The current step is computed again: the model and the data, not a fault, explain its second result."""
        self._lenient = LEAST

    def begin(self) -> None:
        """Another history begins."""
        self._losses.clear()
        self._norms.clear()
