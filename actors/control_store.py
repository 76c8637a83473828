"""Ray's control store (GCS), watched: 60 s after it is lost, Ray ends its cluster without a word. A run ends in order before that."""

from __future__ import annotations

from dataclasses import dataclass

ASK_S = 2.0
"""Between two questions, and for each answer."""
LOST_S = 30.0
"""A control store that has not answered for so long is lost. One that keeps its tables elsewhere has been started again by then."""
END_S = 20.0
"""For the run to end in order then: by the usual grace it has, 15 s after it is told to."""
RAY_ENDS_S = 60.0
"""``gcs_rpc_server_reconnect_timeout_s`` of Ray: processes that have not reached it for so long end themselves."""


@dataclass(slots=True)
class Silence:
    """For how long nothing has been heard. Pure."""

    since_s: float | None = None

    def note(self, answered: bool, now_s: float) -> float:
        """Note an answer, or that there was none. Returns for how many seconds there has been none."""
        if answered:
            self.since_s = None
            return 0.0
        self.since_s = now_s if self.since_s is None else self.since_s
        return now_s - self.since_s


def why_lost(address: str, silent_s: float) -> str:
    """For the end of the run."""
    return (
        f"Ray's control store (GCS) at {address} has not answered for {silent_s:.0f} s, and Ray ends a cluster that is without it for"
        f" {RAY_ENDS_S:.0f} s"
    )
