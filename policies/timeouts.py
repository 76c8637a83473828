"""The time that a rank may go without a step before it counts as hung, from the duration of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fleet.errors import ConfigError
from fleet.protocol.decisions import Decision, TimeOut
from fleet.settings.run import RunSettings, Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressTimeout:
    """The progress time-out as a multiple of a high quantile of measured steps, between ``floor_s`` and ``ceiling_s``.

    The ceiling also holds while too few steps are known. The time-out falls slowly: after quick steps, a slow stretch must not count as a
    hang.

    Attributes:
        factor: multiple of the quantile: a step that takes so many times as long as nearly all others is a hang.
        quantile: quantile of the last steps, of which the time-out is a multiple.
        window: the number of last steps that count.
        least: the least number of known steps.
        shrink: the time-out falls by at most this share at a time, and rises at once.
    """

    factor: float = 10.0
    quantile: float = 0.99
    window: int = 256
    least: int = 20
    shrink: float = 0.1
    floor_s: float = 5.0
    ceiling_s: float = Timeouts().progress_s

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.ceiling_s:
            raise ConfigError("progress.floor_s", self.floor_s, f"must be above 0 and not above ceiling_s = {self.ceiling_s:g}")

    @classmethod
    def of(cls, run: RunSettings) -> Self:
        """The policy of a run: never above the setting, and never so low that a view which is hard to form counts as a hang."""
        limits = run.timeouts
        return cls(floor_s=min(2 * limits.form_s, limits.progress_s), ceiling_s=limits.progress_s)

    def decide(self, steps_s: Sequence[float], present_s: float) -> Decision:
        """Action ``keep`` or ``set``; ``payload.progress_s`` is the time-out from now on.

        Args:
            steps_s: durations of the last steps, newest last; values that are no number or not positive are left out.
            present_s: the time-out now.
        """
        known = sorted(s for s in steps_s[-self.window :] if 0 < s < math.inf)
        if len(known) < self.least:
            reason = f"{len(known)} steps are known, {self.least} are needed: the ceiling"
            return self._settled(present_s, self.ceiling_s, reason, len(known))
        typical_s = quantile(known, self.quantile)
        wanted_s = min(max(self.factor * typical_s, self.floor_s), self.ceiling_s)
        next_s = max(wanted_s, min(present_s * (1 - self.shrink), self.ceiling_s))
        reason = f"{self.factor:g} times the {self.quantile:.0%} quantile of {len(known)} steps, {typical_s:.3g} s"
        return self._settled(present_s, next_s, reason, len(known), typical_s, wanted_s)

    @staticmethod
    def _settled(
        present_s: float, next_s: float, reason: str, steps: int, quantile_s: float | None = None, wanted_s: float | None = None
    ) -> Decision:
        same = math.isclose(present_s, next_s, rel_tol=0.02)
        progress_s = present_s if same else next_s
        return Decision("keep" if same else "set", reason, TimeOut(float(steps), progress_s, present_s, quantile_s, wanted_s))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of sorted values, with linear interpolation (Hyndman and Fan, type 7)."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
