"""What was measured between two nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """The round trip of a small message in seconds, and the bytes per second each way. ``error``: why there is nothing, a sentence."""

    one: str
    other: str
    round_trip_s: float = math.nan
    there_bytes_per_s: float = math.nan
    back_bytes_per_s: float = math.nan
    error: str = ""

    @property
    def ends(self) -> tuple[str, str]:
        return self.one, self.other
