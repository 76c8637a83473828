"""What listeners of this process have refused: counted by listener and reason, and named in the log, at most so often."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from fleet.protocol.facts import RefusedLines

log = logging.getLogger("fleet.refusals")

LOG_S = 1.0
"""Of each listener one line in this time; the next one says how many were left out."""
REPORT_S = 2.0
"""What was counted is told to the coordinator, and so written into the journal, at most so often."""


class Refusals:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[tuple[str, str], RefusedLines] = {}
        self._logged_s: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}
        self._taken_s = 0.0

    def note(self, listener: str, reason: str, peer: str, detail: str = "") -> None:
        """Count one, and log it unless one was logged just now."""
        with self._lock:
            before = self._counted.get((listener, reason))
            self._counted[listener, reason] = RefusedLines("", listener, reason, peer, (before.count if before else 0) + 1)
            now_s = time.monotonic()
            if now_s - self._logged_s.get(listener, -LOG_S) < LOG_S:
                self._unlogged[listener] = self._unlogged.get(listener, 0) + 1
                return
            self._logged_s[listener] = now_s
            left_out = self._unlogged.pop(listener, 0)
        more = f" (and {left_out} before it)" if left_out else ""
        log.warning("%s: a connection from %s was refused: %s%s%s", listener, peer or "?", reason, f": {detail}" if detail else "", more)

    def take(self, where: str) -> list[RefusedLines]:
        """What ``where`` has refused since the last time, for the journal; nothing within ``REPORT_S`` of that."""
        with self._lock:
            now_s = time.monotonic()
            if not self._counted or now_s - self._taken_s < REPORT_S:
                return []
            self._taken_s = now_s
            taken, self._counted = list(self._counted.values()), {}
            return [replace(each, where=where) for each in taken]


REFUSALS = Refusals()
"""Of this process."""
