"""How much of the exchange of gradients was hidden behind a rank's shards, summed over all reductions of this process.

A rank asks for its peers' sums while it still computes. Peers that are done early send them, and a rank that computes its last shard sends
bucket after bucket (:mod:`actors.rank.step.early`). Bytes that have arrived when this rank is done with its shards were hidden. Their time
is estimated at the rate of the other bytes. It is at most the time since this rank's own exchange began, or since the first peer was done.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.rank.telemetry.usage import RECEIVED


class Before(NamedTuple):
    """Byte counts when a rank is done with its shards: asked for early, arrived of these, received in total."""

    asked: int
    landed: int
    received: int


class Exchanged:
    """Totals of ``count`` reductions: hidden time of this rank, bytes received, and bytes that arrived early."""

    def __init__(self) -> None:
        self.count = self.hidden_us = self.received_bytes = self.ahead_bytes = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The totals, for ``Usage``."""
        return self.count, self.hidden_us, self.received_bytes, self.ahead_bytes

    def note(self, before: Before, lead_us: int, exposed_us: int) -> None:
        """Add one reduction.

        Args:
            lead_us: from the begin of this rank's exchange, or the end of its first peer's shards, to the end of its own shards.
            exposed_us: the time of its exchange after all ranks were done with their shards.
        """
        rest = RECEIVED.total - before.received + before.asked - before.landed
        self.count += 1
        self.received_bytes += rest + before.landed
        self.ahead_bytes += before.landed
        self.hidden_us += hidden_us(before.landed, rest, lead_us, exposed_us)


def hidden_us(landed: int, rest: int, lead_us: int, exposed_us: int) -> int:
    """The time of ``landed`` bytes at the rate of ``rest`` bytes in ``exposed_us``; at most ``lead_us``, in which they came."""
    if landed <= 0:
        return 0
    at_that_rate = exposed_us * landed // rest if rest > 0 else lead_us
    return max(0, min(lead_us, at_that_rate))


EXCHANGED = Exchanged()
