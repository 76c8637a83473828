"""The one place where time is read. Core code takes ``now_s`` as an argument instead."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...


class MonotonicClock:
    """``CLOCK_MONOTONIC``: shared by all processes of a host."""

    def now_s(self) -> float:
        return time.monotonic()
