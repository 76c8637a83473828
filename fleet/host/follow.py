"""Follows a journal, while its run goes on or afterwards. It keeps the ledger, the timeline, the history and each slot's place up to date.

The world's size bounds its memory; the journal's length does not. It reads the file in pieces, the timeline has a fixed number of buckets,
and of all other lists it keeps the newest entries. It opens a long journal from the snapshot beside it, if there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from fleet.errors import FleetError, JournalError, LedgerError
from fleet.host import snapshots
from fleet.host.clock import unix_time_s
from fleet.host.journal import JournalTail, read_journal
from fleet.ledger.goodput import Ledger
from fleet.ledger.report import History, Report, build_report, report_of
from fleet.ledger.summary import LedgerSummary
from fleet.ledger.tallies import SlotStatus
from fleet.ledger.timeline import Timeline
from fleet.protocol.journal import decode_line
from fleet.protocol.records import DataRead, Record, Resumed, RunEnded, RunStarted

T = TypeVar("T")
PIECE_BYTES = 4 * 2**20
MOST = 2_000
"""The follower keeps so many of the newest happenings of each kind."""
SILENT_S = 30.0
"""The writer of a journal that has no end and has not grown for so long counts as gone."""
TAIL_BYTES = 65_536


def is_over(journal: Path) -> bool:
    """Whether the run has an end, or no process writes its journal any more."""
    return last_words(journal)[1] is not None or _quiet(journal, unix_time_s())


def _quiet(journal: Path, unix_s: float) -> bool:
    """Whether the journal has not grown for long. False for a journal that is not there."""
    try:
        return unix_s - journal.stat().st_mtime > SILENT_S
    except FileNotFoundError:
        return False


class Follower:
    """One journal, folded as it grows. Safe to use from several threads.

    Attributes:
        version: rises with every poll that brought something new.
        caught_up: whether the follower has reached the end of the journal once, or its damage. Before that its sums are of the past.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.version = 0
        self.caught_up = False
        self._damage = self._torn = ""
        self._unfolded = 0  # lines read whose records the ledger has not taken
        self._lock = threading.Lock()
        self._tail = JournalTail(journal)
        self._ledger = Ledger(Timeline())
        self._history = History(MOST)
        self._anchor = (0.0, 0.0)
        self._kept_bytes = 0
        self._restore()

    def _restore(self) -> None:
        kept = snapshots.load(self.journal)
        if kept is not None:
            self._kept_bytes, line, (self._ledger, self._history, self._anchor) = kept
            self._tail = JournalTail(self.journal, self._kept_bytes, line)
            self.version = 1

    @property
    def damage(self) -> str:
        """Why reading stopped before the end of the file, and at which line; empty without damage. The lines before it are folded.

        An incomplete last line is damage once no process writes any more. A writer that goes on cuts it off, and then it is no damage.
        """
        return self._damage or self._torn

    @property
    def good_lines(self) -> int:
        """The number of folded lines."""
        return self._tail.place[1] - self._unfolded

    def keep(self, least_bytes: int = snapshots.LEAST_BYTES) -> bool:
        """Keep a snapshot of the fold beside the journal, unless the last one is less than ``least_bytes`` old. Returns whether it did."""
        with self._lock:
            offset, line = self._tail.place
            if self._damage or offset - self._kept_bytes < least_bytes:
                return False
            self._kept_bytes = offset  # also when the write fails: the next try comes when the journal has grown
            return snapshots.save(self.journal, offset, line, (self._ledger, self._history, self._anchor))

    def poll(self, limit_bytes: int = PIECE_BYTES) -> list[Record]:
        """Fold the journal's new part, at most one piece of it. Returns the new records, oldest first. Damage ends it, see ``damage``."""
        with self._lock:
            if self._damage:
                return []
            try:
                records = self._tail.poll(limit_bytes)
            except (JournalError, OSError) as error:
                self._damage, records = str(error), []
            if self._ledger.started is not None and not self.journal.exists():
                self._damage = f"{self.journal.parent} was deleted while it was looked at; the run itself may go on"
            folded, before = self._fold(records), self._torn
            self._torn = "" if records or self._damage else self._incomplete()
            self.version += bool(records or self._damage or self._torn != before)
            self.caught_up |= bool(self._damage) or not records
            return folded

    def _incomplete(self) -> str:
        """The text about an incomplete last line whose writer is gone; empty where there is none."""
        rest_bytes = self._tail.behind_bytes
        if rest_bytes <= 0 or not _quiet(self.journal, unix_time_s()):
            return ""
        offset, line = self._tail.place
        return f"{self.journal}:{line + 1}: the last line is incomplete, {rest_bytes} bytes from byte {offset} on; its writer is gone"

    def _fold(self, records: list[Record]) -> list[Record]:
        for number, record in enumerate(records):
            try:
                self._ledger.apply(record)
            except LedgerError as error:
                self._unfolded = len(records) - number
                self._damage = f"{self.journal}:{self.good_lines + 1}: {error}"
                return records[:number]
            self._history.add(record)
            if isinstance(record, RunStarted | Resumed):
                self._anchor = (record.at_s, record.unix_time_s)
        return records

    def read(self) -> Follower:
        """Fold the whole journal as it is now, and keep a snapshot when that was long. Returns the follower itself."""
        while self.poll():
            self.keep(snapshots.EVERY_BYTES)
        self.keep()
        return self

    @property
    def ended(self) -> bool:
        return self._ledger.ended is not None

    @property
    def started(self) -> RunStarted | None:
        return self._ledger.started

    def silent(self, unix_s: float | None = None) -> bool:
        """Whether the run has no end, and no process writes its journal any more."""
        return not self.ended and _quiet(self.journal, unix_time_s() if unix_s is None else unix_s)

    def now_s(self) -> float | None:
        """The time on the run's clock, by this host's calendar. None when the run does not go on: its last record's time counts then."""
        if self.ended or self.damage or self._tail.behind_bytes > PIECE_BYTES or self.silent():
            return None
        at_s, unix_s = self._anchor
        return at_s + unix_time_s() - unix_s

    def summary(self) -> LedgerSummary | None:
        """The ledger now; None before the run's first record."""
        with self._lock:
            return self._ledger.summary(self.now_s()) if self._ledger.started is not None else None

    def look(self, how: Callable[[Report], T]) -> T | None:
        """``how`` of the run's report now; None before the run's first record. Keep no part of the timeline: it goes on changing."""
        with self._lock:
            if self._ledger.started is None:
                return None
            return how(report_of(self._ledger, self._history, self._ledger.summary(self.now_s())))

    @property
    def data(self) -> DataRead | None:
        """The data that the run trains on; None until the run has recorded it."""
        return self._history.data

    @property
    def step_s(self) -> float | None:
        """The duration of a step now; see :class:`fleet.ledger.pace.Pace`."""
        return self._history.pace.step_s

    def decided(self) -> dict[str, Any]:
        """The decisions of policies so far; see :meth:`fleet.ledger.report.History.decided`."""
        with self._lock:
            return self._history.decided()

    def slots(self) -> list[SlotStatus]:
        """The process and state of each slot."""
        with self._lock:
            return self._ledger.tally.slots()

    def injected(self) -> tuple[str, ...]:
        """Kinds of the injected faults that last and strike no single rank, but a resource that all share."""
        with self._lock:
            return self._ledger.tally.injected()


def open_report(journal: Path) -> tuple[Report, str]:
    """(report of the good part of a journal, reason and place where that part ends before the file does, else empty).

    Raises JournalError when no line is good, OSError when the file cannot be read.
    """
    torn: list[str] = []
    try:
        report = build_report(read_journal(journal, on_torn=torn.append))
    except (JournalError, LedgerError):
        follower = Follower(journal).read()
        if not follower.good_lines:
            raise
        return build_report(islice(read_journal(journal), follower.good_lines)), follower.damage
    return report, Follower(journal).read().damage if torn else ""


def good_records(journal: Path) -> tuple[list[Record], str]:
    """(records of the good part of a journal without the ranks' time, reason and place where it ends before the file does, else empty).

    Raises as :func:`open_report` does.
    """
    records: list[Record] = []
    torn: list[str] = []
    try:
        records.extend(read_journal(journal, spans=False, on_torn=torn.append))  # up to where it raises
    except JournalError as error:
        if not records:
            raise
        return records, str(error)
    return records, Follower(journal).read().damage if torn else ""


def last_words(journal: Path) -> tuple[RunStarted | None, RunEnded | None]:
    """First record of a journal, and the end of its run if it has one, for a list of runs. It does not read the records in between."""
    try:
        first = next(read_journal(journal, spans=False, on_torn=lambda message: None), None)
        with journal.open("rb") as file:
            file.seek(max(0, journal.stat().st_size - TAIL_BYTES))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith((b'["RunEnded",', b'["Resumed",'))]
        last = decode_line(lines[-1]) if lines else None
    except (FleetError, ValueError, OSError):
        return None, None
    return (first if isinstance(first, RunStarted) else None), (last if isinstance(last, RunEnded) else None)
