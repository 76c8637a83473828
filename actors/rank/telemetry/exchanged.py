"""How much of the exchange of gradients was hidden behind a rank's shards, summed over all reductions of this process.

A rank asks for what its peers bring while it still computes; who is done early sends it, and who computes its last shard gives bucket after
bucket (:mod:`actors.rank.step.early`). What has arrived by the time that this rank is done was hidden. Its bytes are counted; its time is
what those bytes would have taken at the rate of the others, and never more than since its own exchange began, or the first peer was done.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.rank.telemetry.usage import RECEIVED


class Before(NamedTuple):
    """What is known when a rank is done with its shards: of what was asked for ahead, in bytes, and what it has received in all."""

    asked: int
    landed: int
    received: int


class Exchanged:
    """Totals. ``hidden_us`` is time of this rank, ``received_bytes`` and ``ahead_bytes`` are of ``count`` reductions."""

    def __init__(self) -> None:
        self.count = self.hidden_us = self.received_bytes = self.ahead_bytes = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """As ``Usage`` has them."""
        return self.count, self.hidden_us, self.received_bytes, self.ahead_bytes

    def note(self, before: Before, lead_us: int, exposed_us: int) -> None:
        """One reduction: ``lead_us`` before this rank was done its exchange began, or its first peer was done; ``exposed_us`` it has
        exchanged since all were."""
        rest = RECEIVED.total - before.received + before.asked - before.landed
        self.count += 1
        self.received_bytes += rest + before.landed
        self.ahead_bytes += before.landed
        self.hidden_us += hidden_us(before.landed, rest, lead_us, exposed_us)


def hidden_us(landed: int, rest: int, lead_us: int, exposed_us: int) -> int:
    """Time of ``landed`` bytes where ``rest`` took ``exposed_us``; no more than ``lead_us``, in which they came."""
    if landed <= 0:
        return 0
    at_that_rate = exposed_us * landed // rest if rest > 0 else lead_us
    return max(0, min(lead_us, at_that_rate))


EXCHANGED = Exchanged()
