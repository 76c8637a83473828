"""Where a rank's time goes, recorded by the rank in memory that outlives it.

A rank appends a row whenever its activity changes: ``(time, code, generation, history, step)``, a few microseconds each. The rows lie in a
file mapped into memory (on tmpfs), so a SIGKILL loses none of them. The node's agent drains the ring, and closes the last span at the
moment of death. The header has the rank's position, so the loop need not send it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fleet.host.clock import now_us
from fleet.protocol.records import ABANDON, CATEGORIES, COMMIT, GARBAGE, HOLD, INIT, STEP_CODES

OWN = "g"
"""Code of a row that is no span: ``step`` holds the microseconds of the accelerator for the shards of the current step."""

ROW = struct.Struct("<qqiic7x")
HEADER_BYTES = 128
CAPACITY = 1 << 15
WRITTEN, READ, BEAT, PROGRESS, GENERATION, HISTORY, STEP, SHARD, STEPPING, TOTAL, BETWEEN, COLLECTING, MOVING = range(13)
"""Words of the header, of 8 bytes, each read and written at once. ``struct`` would zero a word and then fill it byte by byte. A reader in
another process could then see 0, as of a rank without a beat."""


def ring_path(folder: Path, token: str) -> Path:
    """The file that a rank's process writes, and the agent of its node reads."""
    return folder / f"ring-{token}"


class Row(NamedTuple):
    at_us: int
    step: int
    generation: int
    history: int
    code: str


class Position(NamedTuple):
    """A rank's position, from its ring's header. ``shard`` is -1 outside shards; ``stepping`` is False while a long call is expected.
    ``between`` is True from a commit until the loop asks for its next step: meanwhile the user's code runs. While ``collecting`` no thread
    of the process runs Python, so none beats. While ``moving``, chunks of a sharded state are on their way to their ranks."""

    beat_us: int
    progress_us: int
    generation: int
    history: int
    step: int
    shard: int
    stepping: bool
    between: bool
    collecting: bool
    moving: bool


def header_words(ring: mmap.mmap) -> memoryview:
    """The header as 64-bit integers, each loaded and stored at once."""
    return memoryview(ring)[:HEADER_BYTES].cast("q")


def read_position(header: memoryview) -> Position:
    beat_us, progress_us, generation = header[BEAT], header[PROGRESS], header[GENERATION]
    where = header[HISTORY], header[STEP], header[SHARD]
    return Position(beat_us, progress_us, generation, *where, *(bool(header[word]) for word in (STEPPING, BETWEEN, COLLECTING, MOVING)))


class Recorder:
    """The writing end. One thread records spans; another may call ``beat``. While ``paused``, the current span goes on."""

    def __init__(self, path: Path, start_us: int, clock: Callable[[], int] = now_us) -> None:
        self.now_us = clock
        with open(path, "w+b") as file:
            # Allocates all pages now. If /dev/shm were full at the first use of a page, the kernel would end this process (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + CAPACITY * ROW.size)
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = header_words(self._map)
        self.path = path
        self.generation = self.history = self.step = -1
        self.code = INIT
        self.paused = False
        self._written = 0
        self._last_us = start_us
        self._garbage_us = 0  # collected in the present span, and not recorded yet
        fresh = {GENERATION: -1, HISTORY: -1, STEP: -1, SHARD: -1, STEPPING: 1, BETWEEN: 0, COLLECTING: 0, MOVING: 0, PROGRESS: start_us}
        for word, value in fresh.items():
            self._words[word] = value
        self.beat()
        self._append(start_us, INIT)

    def switch(self, code: str, at_us: int | None = None) -> int:
        """Begin a span of ``code`` now, or at ``at_us``, never before the last row. Returns the time."""
        at_us = self.now_us() if at_us is None else at_us
        if code != self.code and not self.paused:
            at_us = max(at_us, self._last_us)
            self._append(at_us, code)
            self.code = code
        return at_us

    @contextmanager
    def during(self, code: str) -> Iterator[None]:
        """Context of a span of ``code``; then the span before it continues. After an error within, ``code`` goes on."""
        before = self.code
        self.switch(code)
        yield
        self.switch(before)

    def place(self, generation: int, history: int, step: int) -> None:
        """The rank is now at ``step`` of ``history``, in ``generation``."""
        self.generation, self.history, self.step = generation, history, step
        for word, value in ((GENERATION, generation), (HISTORY, history), (STEP, step), (PROGRESS, self.now_us())):
            self._words[word] = value
        self._append(max(self.now_us(), self._last_us), self.code)

    def commit(self, at_us: int) -> None:
        """The step attempt ends with a commit; the step number goes up."""
        self._append(max(at_us, self._last_us), COMMIT)
        self.step += 1
        self._words[STEP] = self.step
        self._words[PROGRESS] = at_us

    def moving(self, on: bool) -> None:
        """Whether chunks of a sharded state are on their way to their ranks."""
        self._words[MOVING] = on

    def abandon(self) -> None:
        """The step attempt ends without a commit."""
        self._append(max(self.now_us(), self._last_us), ABANDON)

    def hold(self) -> None:
        """The step attempt stops for a lost peer. Its computing time counts, its waiting time does not."""
        self._append(max(self.now_us(), self._last_us), HOLD)

    def worked(self) -> None:
        """The shards of this step are computed. The work that follows does not depend on the number of shards."""
        if not self.paused:
            self._append(max(self.now_us(), self._last_us), self.code)

    def measured(self, us: int) -> None:
        """The accelerator took so long for the shards of this step; 0: unknown."""
        if us and not self.paused:
            self._append(self._last_us, OWN, us)

    def total(self, steps: int) -> None:
        """Set how many steps the run has. The gain of a remedy depends on it."""
        self._words[TOTAL] = steps

    def shard(self, shard: int) -> None:
        """Set the shard that is being computed, or -1. It shows which shard kills the ranks that compute it."""
        self._words[SHARD] = shard

    def stepping(self, yes: bool) -> bool:
        """False while a call of the user's may take longer than any step. Returns the value before."""
        was, self._words[STEPPING] = bool(self._words[STEPPING]), int(yes)
        return was

    def between(self, yes: bool) -> None:
        """Whether the loop is after a commit, and has not asked for its next step."""
        self._words[BETWEEN] = int(yes)

    def collecting(self, yes: bool) -> None:
        """Whether Python collects garbage in some thread of this process. Called in the midst of any other call."""
        self._words[COLLECTING] = int(yes)

    def collected(self, us: int) -> None:
        """Python has collected garbage for so long in the loop's thread. Called in the midst of any other call, so it writes no row."""
        self._garbage_us += us

    def beat(self) -> None:
        self._words[BEAT] = self.now_us()

    def where(self) -> Position:
        return read_position(self._words)

    def _append(self, at_us: int, code: str, step: int | None = None) -> None:
        if self._garbage_us and self.code in STEP_CODES and (us := min(self._garbage_us, at_us - self._last_us)) > 0:
            self._garbage_us -= us
            self._write(at_us - us, GARBAGE)  # at the end of the span, whenever it was
            if code not in CATEGORIES:
                self._write(at_us, self.code)  # it goes on behind the mark
        self._write(at_us, code, step)

    def _write(self, at_us: int, code: str, step: int | None = None) -> None:
        if self._written - self._words[READ] >= CAPACITY:
            return
        offset = HEADER_BYTES + (self._written % CAPACITY) * ROW.size
        ROW.pack_into(self._map, offset, at_us, self.step if step is None else step, self.generation, self.history, code.encode())
        self._written += 1
        self._last_us = at_us
        self._words[WRITTEN] = self._written


class RingReader:
    """The agent's end: drains rows and reads the header, also after the rank's death."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = header_words(self._map)
        self.path = path

    def drain(self) -> list[Row]:
        written, read = (self._words[word] for word in (WRITTEN, READ))
        rows = [self._row(index) for index in range(read, written)]
        self._words[READ] = written
        return rows

    def _row(self, index: int) -> Row:
        at_us, step, generation, history, code = ROW.unpack_from(self._map, HEADER_BYTES + (index % CAPACITY) * ROW.size)
        return Row(at_us, step, generation, history, code.decode())

    def last(self, but: str = "") -> Row | None:
        """The newest row of an activity other than ``but``, drained or not, among the last few rows, as some rows are marks."""
        written = self._words[WRITTEN]
        rows = (self._row(index) for index in range(written - 1, max(-1, written - 8), -1))
        return next((row for row in rows if row.code in CATEGORIES and row.code != but), None)

    def position(self) -> Position:
        return read_position(self._words)

    def total(self) -> int:
        """Steps of the whole run, 0 before the rank knows."""
        return int(self._words[TOTAL])
