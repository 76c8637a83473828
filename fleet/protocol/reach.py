"""Whether a node can still reach the coordinator's host. Who cannot must not step on: the coordinator may have begun anew without it.

The word of the host counts, not that of the coordinator's process: while that is stopped, or is started again, nobody decides anything, and
ranks go on with the view they have.
"""

from __future__ import annotations

LEASE = 2 / 3
"""Of ``timeouts.heartbeat_s``: ranks that are cut off have left their view before the coordinator gives them up."""


class Reach:
    """When the coordinator's host last answered. Pure: it is told, and asked, with the time.

    Attributes:
        lease_s: how long a node's ranks may go on without an answer.
    """

    def __init__(self, now_s: float, lease_s: float) -> None:
        self.lease_s = lease_s
        self._answered_s, self._lapsed = now_s, False

    def answered(self, at_s: float) -> None:
        """The host has answered at ``at_s``."""
        self._answered_s = max(self._answered_s, at_s)

    def lapses(self, now_s: float) -> bool:
        """Whether the lease is over; True once each time that it runs out."""
        before, self._lapsed = self._lapsed, now_s - self._answered_s > self.lease_s
        return self._lapsed and not before
