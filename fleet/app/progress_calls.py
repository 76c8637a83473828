"""How far a run is, told to a function of the user's about once a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.app.follow import Follower
from fleet.ledger.happenings import Narrator
from fleet.protocol.records import Measurement

log = logging.getLogger("fleet.launch")
EVERY_S = 1.0
JOIN_S = 10.0
"""How long the end of a run waits for a call that is under way."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A run as it is now.

    Attributes:
        step: how many steps are committed.
        total: of the whole run; 0 while the loop has not said it.
        world: how many ranks train at the moment.
        goodput: share of the wanted ranks' time, so far, that went into steps that count.
        wall_s: seconds since the run began.
        loss: the last one that was noted; None before the first.
        event: what happened last, as the command line tells it; empty before anything did.
        ended: this is the last call.
    """

    step: int
    total: int
    world: int
    goodput: float
    wall_s: float
    loss: float | None
    event: str
    ended: bool = False


@contextmanager
def reporting(journal: Path, report_to: Callable[[Progress], object] | None) -> Iterator[None]:
    """Follow the run's journal meanwhile, and tell. Without ``report_to`` nothing is done."""
    if report_to is None:
        yield
        return
    calls = _Calls(Follower(journal), report_to)
    thread = threading.Thread(target=calls.run, name="fleet-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        calls.stop.set()
        thread.join(JOIN_S)


class _Calls:
    """What the thread does."""

    def __init__(self, follower: Follower, report: Callable[[Progress], object]) -> None:
        self.stop = threading.Event()
        self._follower, self._report = follower, report
        self._narrator, self._event, self._raised = Narrator(), "", False
        self._loss: float | None = None

    def run(self) -> None:
        while not self.stop.wait(EVERY_S):
            self._step(ended=False)
        self._step(ended=True)

    def _step(self, *, ended: bool) -> None:
        now_s = time.monotonic()
        while records := self._follower.poll():
            lines = [line for record in records for line in self._narrator.take(record, now_s)]
            self._event = str(lines[-1]) if lines else self._event
            for record in records:
                if isinstance(record, Measurement) and record.name == "loss":
                    self._loss = record.value
        lines = [*self._narrator.due(now_s), *(self._narrator.rest() if ended else [])]
        self._event = str(lines[-1]) if lines else self._event
        found = self._now(ended)
        if found is not None:
            self._call(found)

    def _now(self, ended: bool) -> Progress | None:
        summary = self._follower.summary()
        if summary is None:
            return None
        total = data.total_steps if (data := self._follower.data) is not None else 0
        return Progress(summary.steps, total, summary.view_size, summary.goodput, summary.wall_s, self._loss, self._event, ended)

    def _call(self, found: Progress) -> None:
        try:
            self._report(found)
        except Exception:  # the run is not to end for it
            if not self._raised:
                log.exception("progress= raised an error, which is told once; the run goes on.")
            self._raised = True
