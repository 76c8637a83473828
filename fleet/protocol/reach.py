"""Whether a node can still reach the coordinator's host. Ranks of a node that cannot must not step: the run may go on without them.

An answer of the host counts, also without one of the coordinator's process. While that process is stopped, or starts again, the run gets no
new view, and ranks go on in the view that they have.
"""

from __future__ import annotations

LEASE = 2 / 3
"""Share of ``timeouts.heartbeat_s``: ranks that are cut off have left their view before the coordinator gives them up."""


class Reach:
    """The time since the last answer of the coordinator's host. Pure: time is an argument.

    Attributes:
        lease_s: seconds that a node's ranks may go on without an answer.
    """

    def __init__(self, now_s: float, lease_s: float) -> None:
        self.lease_s = lease_s
        self._answered_s, self._lapsed = now_s, False

    def answered(self, at_s: float) -> None:
        """The host has answered at ``at_s``."""
        self._answered_s = max(self._answered_s, at_s)

    def unanswered_s(self, now_s: float) -> float:
        return now_s - self._answered_s

    def lapses(self, now_s: float) -> bool:
        """Whether the lease is over; True once each time that it runs out."""
        before, self._lapsed = self._lapsed, self.unanswered_s(now_s) > self.lease_s
        return self._lapsed and not before
