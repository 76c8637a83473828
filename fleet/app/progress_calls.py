"""The progress of a run while it goes on: threads that follow its journal, and the calls of a user's function about once a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fleet.host.follow import Follower
from fleet.host.rank_logs import RunLogs, logs_of
from fleet.ledger.figures import figure
from fleet.ledger.happenings import Line, Narrator
from fleet.ledger.report import duration
from fleet.protocol.records import PROGRAM, Measurement, Record

log = logging.getLogger("fleet.launch")
EVERY_S = 1.0
JOIN_S = 10.0
"""How long the end of a run waits for a call that is under way."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A run as it is now.

    Attributes:
        step: how many steps are committed.
        total: steps of the whole run; 0 while the loop has not given it.
        world: how many ranks train at the moment.
        goodput: share of the wanted ranks' time, so far, that went into steps that count.
        wall_s: seconds since the run began.
        loss: the last one that was noted; None before the first.
        event: the last event, as the command line tells it; empty before the first.
        ended: this is the last call.
        printed: lines that ranks have printed since the last call, each with its rank.
    """

    step: int
    total: int
    world: int
    goodput: float
    wall_s: float
    loss: float | None
    event: str
    ended: bool = False
    printed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The text that ``progress=print`` shows: the ranks' output, then one line."""
        steps = f"step {self.step:,}/{self.total:,}" if self.total else f"step {self.step:,}"
        loss = [f"loss {figure(self.loss)}"] if self.loss is not None else []
        said = [f"{duration(self.wall_s):>9}", steps, *loss, f"goodput {self.goodput:.1%}", f"{self.world} ranks", self.event.strip()]
        return "\n".join([*self.printed, "  ".join(filter(None, said))])


class Watching:
    """Follows a journal in a thread while its run goes on, and a last time at its end. Use as a context manager.

    Args:
        every_s: seconds between two looks at the journal.
        clock: seconds that do not go back.
    """

    join_s: float | None = None
    """How long the end waits for the thread; None: as long as it takes."""

    def __init__(self, follower: Follower, every_s: float, clock: Callable[[], float], narrator: Narrator) -> None:
        self._follower, self._every_s, self._clock, self._narrator = follower, every_s, clock, narrator
        self._figures: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fleet-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(self.join_s)

    def _follow(self) -> None:
        while not self._stop.wait(self._every_s if self._follower.caught_up else 0.0):
            self._take_all(self._follower.poll())
            self._say(self._narrator.due(self._clock()))
            self._show(ended=False)
        while records := self._follower.poll():
            self._take_all(records)
        self._say(self._narrator.rest())
        self._show(ended=True)

    def _take_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self._take(record)
            self._say(self._narrator.take(record, self._clock()))

    def _take(self, record: Record) -> None:
        if isinstance(record, Measurement) and record.name not in PROGRAM:
            self._figures[record.name] = record.value

    def _say(self, lines: Iterable[Line]) -> None:
        """Show these lines, which tell the newest events."""
        raise NotImplementedError

    def _show(self, *, ended: bool) -> None:
        """Show the run's progress."""
        raise NotImplementedError

    def _total(self) -> int:
        data = self._follower.data
        return data.total_steps if data is not None else 0


def reporting(journal: Path, report_to: Callable[[Progress], object] | None) -> AbstractContextManager[object]:
    """Follow the run's journal meanwhile, and call ``report_to``; without it, do nothing."""
    return _Calls(Follower(journal), report_to) if report_to is not None else nullcontext()


class _Calls(Watching):
    join_s = JOIN_S

    def __init__(self, follower: Follower, report: Callable[[Progress], object]) -> None:
        super().__init__(follower, EVERY_S, time.monotonic, Narrator())
        self._report, self._event, self._raised = report, "", False
        self._logs = RunLogs(logs_of(follower.journal.parent), from_start=False)

    def _say(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._event = str(line)

    def _show(self, *, ended: bool) -> None:
        s = self._follower.summary() if self._follower.caught_up else None
        if s is None:
            return
        loss, printed = self._figures.get("loss"), tuple(self._logs.poll(last=ended))
        try:
            self._report(Progress(s.steps, self._total(), s.view_size, s.goodput, s.wall_s, loss, self._event, ended, printed))
        except Exception:  # the run is not to end for it
            if not self._raised:
                log.exception("progress= raised an error, which is logged once; the run goes on.")
            self._raised = True
        if ended:
            self._logs.close()
