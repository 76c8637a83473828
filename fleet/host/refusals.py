"""What listeners of this process have refused: counted by listener and reason, and named in the log, at most so often."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from fleet.protocol.facts import RefusedLines

log = logging.getLogger("fleet.refusals")

LOG_S = 1.0
"""Of each listener one line in this time; the next one says how many were left out."""
REPORT_S = 2.0
"""What was counted is told to the coordinator, and so written into the journal, at most so often."""


@dataclass(frozen=True, slots=True)
class Counted:
    """``count`` connections that ``listener`` refused for ``reason``; ``peer`` is the address of the last one."""

    listener: str
    reason: str
    peer: str
    count: int


class Refusals:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[tuple[str, str], Counted] = {}
        self._logged_s: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}
        self._taken_s = 0.0

    def note(self, listener: str, reason: str, peer: str, detail: str = "") -> None:
        """Count one, and log it unless one was logged just now."""
        with self._lock:
            before = self._counted.get((listener, reason))
            self._counted[listener, reason] = Counted(listener, reason, peer, (before.count if before else 0) + 1)
            now_s = time.monotonic()
            if now_s - self._logged_s.get(listener, -LOG_S) < LOG_S:
                self._unlogged[listener] = self._unlogged.get(listener, 0) + 1
                return
            self._logged_s[listener] = now_s
            left_out = self._unlogged.pop(listener, 0)
        more = f" (and {left_out} before it)" if left_out else ""
        log.warning("%s: a connection from %s was refused: %s%s%s", listener, peer or "?", reason, f": {detail}" if detail else "", more)

    def take(self) -> list[Counted]:
        """Refusals counted since the last time; nothing within ``REPORT_S`` of that."""
        with self._lock:
            now_s = time.monotonic()
            if not self._counted or now_s - self._taken_s < REPORT_S:
                return []
            self._taken_s = now_s
            taken, self._counted = list(self._counted.values()), {}
            return taken

    def counts(self) -> dict[tuple[str, str], int]:
        """(listener, reason) -> how many were counted and not taken yet."""
        with self._lock:
            return {key: counted.count for key, counted in self._counted.items()}


REFUSALS = Refusals()
"""Of this process."""


def refused_lines(where: str, refusals: Refusals = REFUSALS) -> list[RefusedLines]:
    """What was refused by ``where`` since the last time, for the journal."""
    return [RefusedLines(where, each.listener, each.reason, each.peer, each.count) for each in refusals.take()]
