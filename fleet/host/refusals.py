"""Connections that the listeners of this process have refused: counts by listener and reason, and lines in the log, at a limited rate."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from fleet.protocol.facts import RefusedLines

log = logging.getLogger("fleet.refusals")

LOG_S = 1.0
"""The log gets one line of a listener in this time; the next one gives the number of refusals left out."""
REPORT_S = 2.0
"""The counts go to the coordinator, and so into the journal, at most once in this time."""


class Refusals:
    """The refusals of one process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[tuple[str, str], RefusedLines] = {}
        self._logged_s: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}
        self._taken_s = 0.0

    def note(self, listener: str, reason: str, peer: str, detail: str = "") -> None:
        """Count one refusal, and log it unless the log just got one of this listener."""
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
        """The refusals at ``where`` since the last call, for the journal; empty within ``REPORT_S`` of that call."""
        with self._lock:
            now_s = time.monotonic()
            if not self._counted or now_s - self._taken_s < REPORT_S:
                return []
            self._taken_s = now_s
            taken, self._counted = list(self._counted.values()), {}
            return [replace(each, where=where) for each in taken]


REFUSALS = Refusals()
"""The refusals of this process."""
