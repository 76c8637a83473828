"""The data of a run's steps, and which steps still count: folded from its journal.

The samples of a shard follow from seed, step, shard, and the data set's size and order alone, so no list of samples is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from fleet.protocol.decisions import GoneBack
from fleet.protocol.draws import LeftOut, left_out_of
from fleet.protocol.records import (
    PLAIN,
    Committed,
    DataFiles,
    DataRead,
    DecisionMade,
    HistoryBegun,
    Record,
    RunStarted,
    configuration,
    section,
)
from fleet.protocol.types import DataFile

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class ReadStretch:
    """Steps ``first`` to ``end``, without that, of one history, all read the same way. ``read`` is None where the journal has no record.

    ``counts``: whether they are part of the run's state; else they were rolled back. ``left_out``: samples left out in this history.
    """

    history: int
    first: int
    end: int
    read: DataRead | None
    counts: bool
    left_out: LeftOut = ()


@dataclass(slots=True)
class FilesOf:
    """The known files of a data set: ``files`` by their number, of ``total``. For the others see ``DataFiles``."""

    reader: str
    layout: str
    window_bytes: int
    total: int
    files: dict[int, DataFile] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all files are known."""
        return len(self.files) == self.total

    @property
    def in_order(self) -> list[DataFile]:
        """The known files, by their number."""
        return [self.files[number] for number in sorted(self.files)]


class DataHistory:
    """The data of one run, folded record by record; it needs no ``Spans``."""

    def __init__(self) -> None:
        self.run, self.seed, self.shards, self.origin = "", 0, 0, ""
        self.is_plain = False
        self.files: dict[str, FilesOf] = {}
        self._left_out: LeftOut = ()
        self._without: dict[int, LeftOut] = {}
        self._begun: list[tuple[int, int]] = [(0, 0)]
        self._committed: dict[int, int] = {}
        self._reads: dict[int, list[DataRead]] = {}

    def apply_all(self, records: Iterable[Record]) -> DataHistory:
        """Take all records of a journal, or the new ones."""
        for record in records:
            self._apply(record)
        return self

    def _apply(self, record: Record) -> None:
        match record:
            case RunStarted(run=run, shards=shards, config=config):
                said = configuration(config)
                self.run, self.shards, self.origin = run, shards, str(said.get("origin", ""))
                self.seed, self.is_plain = int(section(said, "settings").get("seed", 0)), PLAIN in said
                self._left_out = left_out_of(section(said, "settings").get("left_out", ()))
                self._without[0] = self._left_out
            case DecisionMade(payload=GoneBack(left_out=left_out)):
                self._left_out = left_out_of(left_out)
            case HistoryBegun(history=history, from_state=start):
                self._without[history] = self._left_out
                self._begun = [begun for begun in self._begun if begun[0] != history] + [(history, start.step)]
            case Committed(state=state):
                self._committed[state.history] = max(state.step, self._committed.get(state.history, 0))
            case DataRead(history=history):
                known = self._reads.setdefault(history, [])
                known[:] = [read for read in known if read.step < record.step]
                known.append(record)
            case DataFiles():
                made = FilesOf(record.reader, record.layout, record.window_bytes, record.total)
                known_files = self.files.setdefault(record.data_sha256, made)
                known_files.files |= dict(enumerate(record.files, record.first))

    def stretches(self) -> list[ReadStretch]:
        """All committed steps, by history and in order, with those that were rolled back."""
        found: list[ReadStretch] = []
        end_of_kept = NEVER
        for history, first in reversed(self._begun):
            end = self._committed.get(history, first)
            cuts = [first, min(max(first, end_of_kept), end), end]
            for begin, stop, counts in ((cuts[0], cuts[1], True), (cuts[1], cuts[2], False)):
                found += self._within(history, begin, stop, counts)
            end_of_kept = min(end_of_kept, first)
        return sorted(found, key=lambda each: (each.history, each.first))

    def _within(self, history: int, first: int, end: int, counts: bool) -> list[ReadStretch]:
        """Steps ``first`` to ``end``, cut where the way of reading changes."""
        found: list[ReadStretch] = []
        reads = self._reads.get(history, [])
        begins = [first, *(read.step for read in reads if first < read.step < end), end]
        for begin, stop in pairwise(begins):
            if begin < stop:
                read = next((read for read in reversed(reads) if read.step <= begin), None)
                found.append(ReadStretch(history, begin, stop, read, counts, self._without.get(history, ())))
        return found

    @property
    def left_out(self) -> LeftOut:
        """Draws that no step takes from now on, see :mod:`fleet.protocol.draws`."""
        return self._left_out

    @property
    def reads(self) -> list[DataRead]:
        """All records of reads, each data set once."""
        every = [read for reads in self._reads.values() for read in reads]
        return list({(read.samples, read.batch_size, read.data_sha256): read for read in every}.values())
