"""A run on its way to one tracker: what is read of the journal is given to it, and given again until it is taken.

Nothing is copied to be sent later: the journal keeps all, and a file beside it the number of the last item that has arrived. While the
other side is away, the journal is not read on, so that what waits takes no memory.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dashboards.trackers.fold import ORDER, Numbered, TrackFold
from dashboards.trackers.port import Begun, Ended, Item, RunFacts, Span, TrackedFigures, TrackedMark, Tracker, TrackerAway
from fleet.errors import ConfigError
from fleet.host.journal import JournalTail
from fleet.protocol.records import Record

log = logging.getLogger("fleet.trackers")

FOLDER = "track"
"""Of the run's folder: what is known of each tracker, and what it logs."""
PIECE_BYTES = 1 << 18
BATCH = 500
"""So many items are given before they are flushed."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 5.0
"""Between tries, while the other side is away."""
POLL_S = 0.5

Wait = Callable[[float], bool]
"""Waits for so many seconds, or less. True: the time is up, and nothing is tried any more."""


@dataclass
class TrackerStanding:
    """How far a run's way to a tracker is.

    Attributes:
        sent: the number of the last item that has arrived.
        every_s, order, file: how items are counted: seconds between samples, ``dashboards.trackers.fold.ORDER``, and the inode of the
            journal, as one that was folded gives fewer.
        done: the run has ended, and all of it has arrived.
        away: what the other side said, or did not say, last; empty while it takes all.
        refused: how many values it never takes, and ``why``.
        where: what to open to see the run.
    """

    tracker: str
    sent: int = 0
    every_s: float = 0.0
    order: int = 0
    file: int = 0
    done: bool = False
    away: str = ""
    refused: int = 0
    why: str = ""
    where: str = ""

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        lost = f"; {self.refused} values it does not take: {self.why}" if self.refused else ""
        if self.done:
            return f"{self.tracker}: all of it{at}{lost}"
        return f"{self.tracker}: {self.sent} items{at}, not all of the run: {self.away or 'it has no end yet, or the time was up'}{lost}"


def path_of(folder: Path, tracker: str) -> Path:
    """The file of a :class:`TrackerStanding`, in a run's folder."""
    return folder / FOLDER / f"{tracker}.json"


def standing(folder: Path, tracker: str) -> TrackerStanding:
    """How far the run in ``folder`` is; from nothing, when nobody has begun, or a file says something else."""
    try:
        said = json.loads(path_of(folder, tracker).read_text())
        return TrackerStanding(**said)
    except FileNotFoundError:
        return TrackerStanding(tracker)
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is not used: %s", path_of(folder, tracker), error)
        return TrackerStanding(tracker)


class StandingFile:
    """A :class:`TrackerStanding` in its file, by one process at a time. Raises ConfigError when another one has it."""

    def __init__(self, folder: Path, tracker: str) -> None:
        self._path = path_of(folder, tracker)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._path.with_suffix(".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError("--track", tracker, f"another process sends {folder.name} there", "Wait until it has ended.") from error
        self.standing, self._saved = standing(folder, tracker), ""

    def save(self) -> None:
        """Whole or not at all; not again what it says already."""
        text = json.dumps(asdict(self.standing)) + "\n"
        if text == self._saved:
            return
        draft = self._path.with_suffix(".draft")
        draft.write_text(text)
        os.replace(draft, self._path)
        self._saved = text

    def close(self) -> None:
        self._lock.close()


class TrackerSession:
    """One run on its way to one tracker.

    Args:
        journal: the run's.
        tracker: where to.
        kept: how far it is.
        every_s: see :class:`~dashboards.trackers.fold.TrackFold`.
        artefacts: makes the files that belong to the run once it has ended, from the lines of its marks.
        wait: see ``Wait``.
    """

    def __init__(
        self,
        journal: Path,
        tracker: Tracker,
        kept: StandingFile,
        every_s: float,
        artefacts: Callable[[Sequence[str]], Sequence[Path]],
        wait: Wait,
    ) -> None:
        self._tail, self._fold = JournalTail(journal), TrackFold(every_s)
        self._tracker, self._kept, self._artefacts, self._wait = tracker, kept, artefacts, wait
        self._journal, self._every_s, self._skip = journal, every_s, -1
        self._given, self._begun = 0, False

    def run(self, over: Callable[[], bool]) -> TrackerStanding:
        """Send what there is and what comes, until ``over`` says that the journal does not grow any more, and all of it has arrived, or
        the time is up. Raises LedgerError and JournalError where the journal is damaged."""
        at = self._kept.standing
        at.done = False
        while True:
            last = over()  # asked first: what is written before it is so, is read after it
            records = self._tail.poll(PIECE_BYTES)
            if not self._pass_on(records):
                break
            if last and not records:
                at.done = self._pass_on_end() and self._fold.ended and self._try(self._tracker.close)
                break
            if not records and self._wait(POLL_S):
                break
        self._note()
        return at

    def _count(self) -> None:
        """From which item on it goes on: where the last process stopped, if items are counted as it has counted them."""
        at, file = self._kept.standing, self._journal.stat().st_ino
        if self._tracker.anew or (self._every_s, ORDER, file) != (at.every_s, at.order, at.file):
            at.sent = 0
        at.every_s, at.order, at.file = self._every_s, ORDER, file
        self._skip = at.sent

    def _pass_on(self, records: Sequence[Record]) -> bool:
        if records and self._skip < 0:
            self._count()
        for record in records:
            if not all(self._give(each) for each in self._fold.take(record)):
                return False
        return self._flush()

    def _pass_on_end(self) -> bool:
        return all(self._give(each) for each in self._fold.finish()) and self._flush()

    def _give(self, each: Numbered) -> bool:
        """False: the time is up."""
        item = each.item
        if isinstance(item, Begun) and not self._begun:  # each process has to find the run, or make it
            self._begun = self._try(lambda: self._tracker.begin(item))
            if not self._begun:
                return False
        elif each.number > self._skip and not self._try(lambda: self._say(item)):
            return False
        self._given = each.number
        return self._given - self._kept.standing.sent < BATCH or self._flush()

    def _say(self, item: Item) -> None:
        tracker = self._tracker
        match item:
            case TrackedFigures(step=step, values=values, at_s=at_s):
                tracker.figures(step, values, at_s)
            case RunFacts(facts=facts):
                tracker.facts(facts)
            case TrackedMark():
                tracker.mark(item)
            case Span():
                tracker.span(item)
            case Ended():
                for path in self._artefacts(self._fold.report_lines):
                    tracker.artefact(path)
                tracker.end(item)

    def _flush(self) -> bool:
        if self._begun and not self._try(self._tracker.flush):
            return False
        self._kept.standing.sent = max(self._kept.standing.sent, self._given)
        self._note()
        return True

    def _try(self, call: Callable[[], None]) -> bool:
        """Until it succeeds. False: the time is up."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                call()
            except TrackerAway as error:
                if self._kept.standing.away != str(error):
                    log.warning("%s does not take what it is sent: %s", self._kept.standing.tracker, error)
                self._kept.standing.away = str(error)
                self._note()
            else:
                self._kept.standing.away = ""
                return True
            if self._wait(pause_s):
                return False
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _note(self) -> None:
        at, tracker = self._kept.standing, self._tracker
        at.where = tracker.where or at.where
        at.refused, at.why = tracker.refused, tracker.why
        self._kept.save()
