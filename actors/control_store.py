"""Watches Ray's control store (GCS): 60 s after its loss, Ray ends its cluster without notice. A run ends in order before that."""

from __future__ import annotations

from dataclasses import dataclass

ASK_S = 2.0
"""The interval between two questions, and the limit for each answer."""
LOST_S = 30.0
"""A control store without an answer for so long is lost. A store with external tables would have been restarted by then."""
END_S = 20.0
"""The time for the run to end in order then. With the usual grace it ends within 15 s after the order."""
RAY_ENDS_S = 60.0
"""Ray's ``gcs_rpc_server_reconnect_timeout_s``: processes that have not reached the store for so long end themselves."""


@dataclass(slots=True)
class Silence:
    """How long the store has not answered. Pure."""

    since_s: float | None = None

    def note(self, answered: bool, now_s: float) -> float:
        """Note whether the store has answered. Returns for how many seconds it has not."""
        if answered:
            self.since_s = None
            return 0.0
        self.since_s = now_s if self.since_s is None else self.since_s
        return now_s - self.since_s


def why_lost(address: str, silent_s: float) -> str:
    """The reason for the end of the run."""
    return (
        f"Ray's control store (GCS) at {address} has not answered for {silent_s:.0f} s, and Ray ends a cluster that is without it for"
        f" {RAY_ENDS_S:.0f} s"
    )
