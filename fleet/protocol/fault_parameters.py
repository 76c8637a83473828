"""The numbers that faults have, with their bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number of a fault. By hand it is above ``above`` or at least ``least``, and at most ``most``."""

    name: str
    meaning: str
    default: float
    most: float
    least: float | None = None
    above: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within the bounds. NaN is not."""
        return (self.least is None or value >= self.least) and (self.above is None or value > self.above) and value <= self.most

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        low = f"at least {self.least:g}" if self.least is not None else f"above {self.above:g}"
        return f"{low} and at most {self.most:g}"


DURATION = Parameter("duration_s", "seconds that it lasts", 5.0, 600.0, above=0.0)
STOPPED = Parameter("duration_s", "seconds that it lasts; no order ends it earlier", 5.0, 30.0, above=0.0)
SEVERITY = Parameter("severity", "how many times slower: 1 is full speed, 2 half of it", 2.0, 100.0, least=1.0)
NOTICE = Parameter("duration_s", "seconds from its notice until it goes", 5.0, 600.0, above=0.0)
LOSS = Parameter("loss", "share of packets that are lost, each way", 0.01, 1.0, above=0.0)
DELAY = Parameter("delay_s", "seconds that each packet takes longer, each way", 0.02, 2.0, least=0.0)
RATE = Parameter("bytes_per_s", "most bytes a second that each host sends; 0: no limit", 0.0, 1e12, least=0.0)
WRITTEN = Parameter("bytes_per_s", "most bytes a second that are written", 1e6, 1e12, least=1e3)
JITTER = Parameter("jitter_s", "seconds by which delays vary, evenly: packets overtake each other", 0.0, 2.0, least=0.0)
PARAMETERS = (DURATION, SEVERITY, LOSS, DELAY, RATE, JITTER)
