"""The one place where time is read. Core code takes ``now_s`` as an argument instead."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time; tests and the simulator have their own."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...


class MonotonicClock:
    """``CLOCK_MONOTONIC``, shared by a host's processes, plus ``offset_s``: a run resumed after a reboot goes on from its own time."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self.offset_s = offset_s

    def now_s(self) -> float:
        return time.monotonic() + self.offset_s


def unix_time_s() -> float:
    """Wall-clock seconds, for people and for the gap between two clusters; never for durations."""
    return time.time()


def now_us() -> int:
    """Microseconds on the host's monotonic clock."""
    return time.monotonic_ns() // 1000
