"""The files of a data set and how samples lie in them. A run's journal keeps them, so that the origin of each sample can be found later."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from actors.rank.data.readers import File, Grouped, Lines, Records, shown
from actors.rank.data.windows import Windows
from fleet.host.clock import now_us
from fleet.protocol.records import GROUPS, LINES, OWN, STRIDED
from fleet.protocol.types import DataFile

log = logging.getLogger("fleet.data")

MOST_FILES = 10_000
"""The journal lists the files of a data set if there are at most so many. A longer list would be larger than the rest of the journal."""
MOST_NUMBERS = 200_000
"""The journal keeps at most so many numbers on the groups of a data set."""
AT_ONCE = 64
"""Files in one record."""
CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 64 << 30
"""At most so much of a data set, its first files, is read for digests."""
REST = 9
"""The reader of digests pauses so many times as long as it has read."""
TAGS = ("ETag", "etag", "md5Hash", "content_md5")
"""Names under which stores keep a checksum or version of an object's contents."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample lies: record number ``record`` of file ``path``, in ``size_bytes`` bytes from byte ``offset`` on; -1: unknown.

    A sample that can only be read with others is row ``row`` of group ``group``; the bytes are then the group's.
    """

    path: str
    record: int = -1
    offset: int = -1
    size_bytes: int = -1
    group: int = -1
    row: int = -1

    def __str__(self) -> str:
        if self.group >= 0:
            return f"{self.path}  row {self.row} of group {self.group}, bytes {self.offset} to {self.offset + self.size_bytes}"
        within = f"bytes {self.offset} to {self.offset + self.size_bytes}" if self.offset >= 0 else "where in it is not known"
        return f"{self.path}  {f'record {self.record}, ' if self.record >= 0 else ''}{within}"


@runtime_checkable
class Located(Protocol):
    """A data set that knows where its samples lie, for ``fleet runs data``."""

    def where(self, index: int) -> Place | None:
        """The place of sample ``index``; None when it lies in no file."""


@dataclass(frozen=True)
class FileCatalogue:
    """The files of the data set ``data_sha256``, in its order. ``layout`` and ``window_bytes``: see ``DataFiles``."""

    data_sha256: str
    reader: str
    layout: str
    window_bytes: int
    files: Sequence[DataFile]
    _lines: dict[int, Records | Grouped | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def ends(self) -> list[int]:
        """For each file the number of its last sample plus one."""
        return list(accumulate(file.samples for file in self.files))

    def where(self, index: int) -> Place:
        """The place of sample ``index``. For lines it reads the file itself, if its size is still the same. Raises IndexError."""
        ends = self.ends
        if not 0 <= index < ends[-1]:
            raise IndexError(f"sample {index} of {ends[-1]}")
        number = bisect_right(ends, index)
        file, record = self.files[number], index - (ends[number - 1] if number else 0)
        if self.layout == GROUPS and file.layout:
            return _in_group(file, record)
        start, stop = self._span(number, record)
        return Place(file.path, record, start, stop - start if start >= 0 else -1)

    def _span(self, number: int, record: int) -> tuple[int, int]:
        file = self.files[number]
        if self.layout == STRIDED and file.layout:
            first, stride, size = file.layout
            return first + record * stride, first + record * stride + size
        if self.layout == LINES:
            if number not in self._lines:
                self._lines[number] = _lines_of(file)
            lines = self._lines[number]
            if lines is not None and not isinstance(lines, Grouped) and len(lines) == file.samples:
                return lines.span(record)
        return -1, -1

    def windows(self) -> Windows | None:
        """The order of row groups; None when it is not in the journal."""
        if self.layout != GROUPS or not all(file.layout for file in self.files):
            return None
        numbers = np.array([number for file in self.files for number in file.layout], np.int64).reshape(-1, 4)
        return Windows(numbers[:, 0], numbers[:, 1], self.window_bytes)


def _in_group(file: DataFile, record: int) -> Place:
    sizes, begins, ends = (file.layout[at::4] for at in (0, 2, 3))
    stops = list(accumulate(sizes))
    group = bisect_right(stops, record)
    row = record - (stops[group - 1] if group else 0)
    return Place(file.path, record, begins[group], ends[group] - begins[group], group, row)


def _lines_of(file: DataFile) -> Records | Grouped | None:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(file.path)
    try:
        known = system.info(path)["size"] == file.size_bytes
    except OSError:
        return None
    return Lines().records(File(system, path, file.size_bytes)) if known else None


def catalogue_of(reader: Any, files: Sequence[File], found: Sequence[Records | Grouped], data_sha256: str) -> FileCatalogue:
    """The catalogue of files that were just opened, still without digests."""
    grouped = [one for one in found if isinstance(one, Grouped)]
    if grouped:
        layout = GROUPS
    elif all(hasattr(one, "layout") for one in found):
        layout = STRIDED
    else:
        layout = LINES if isinstance(reader, Lines) else OWN
    spared = MOST_NUMBERS < 4 * sum(len(one.sizes) for one in grouped)
    made = [
        DataFile(shown(file.path), file.size, len(one), modified_s(file), "", () if spared else _layout(one, layout))
        for file, one in zip(files, found, strict=True)
    ]
    return FileCatalogue(data_sha256, type(reader).__name__, layout, getattr(reader, "window_bytes", 1) if grouped else 0, made)


def _layout(records: Any, layout: str) -> tuple[int, ...]:
    if layout == STRIDED:
        return tuple(records.layout)
    if layout != GROUPS:
        return ()
    numbers: list[int] = []
    for group, size in enumerate(records.sizes):
        spans = records.spans(group)
        numbers += [size, records.weight(group), min(begin for begin, _ in spans), max(end for _, end in spans)]
    return tuple(map(int, numbers))


def modified_s(file: File) -> float:
    """When a local file was changed last, in seconds of the epoch; 0 of a file in a store."""
    return os.stat(file.path).st_mtime if is_local(file) else 0.0


def is_local(file: File) -> bool:
    """Whether the file lies in a file system of this host."""
    return "file" in (file.system.protocol if isinstance(file.system.protocol, tuple) else (file.system.protocol,))


def pieces(catalogue: FileCatalogue) -> Iterator[tuple[int, tuple[DataFile, ...]]]:
    """(number of the first file, files) for each record of the journal; none when there are too many files."""
    if len(catalogue.files) <= MOST_FILES:
        for first in range(0, len(catalogue.files), AT_ONCE):
            yield first, tuple(catalogue.files[first : first + AT_ONCE])


# ---- digests -----------------------------------------------------------------------------------------------------------------------------


class Digests:
    """Digests of files that were read before, by path, size and time of the last change: a file of the user's cache folder.

    Args:
        path: one JSON line for each file; it may be deleted at any time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int, float], str] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                name, size, changed_s, digest = json.loads(line)
            except ValueError:
                continue  # another process was killed while it wrote the line
            self._known[name, size, changed_s] = digest

    def known(self, file: DataFile) -> str:
        """The digest of the file; empty when the file has to be read."""
        return self._known.get((file.path, file.size_bytes, file.modified_s), "")

    def keep(self, file: DataFile, digest: str) -> None:
        """Write the digest to the cache, for the next run."""
        self._known[file.path, file.size_bytes, file.modified_s] = digest
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as opened:
            opened.write(json.dumps([file.path, file.size_bytes, file.modified_s, digest]) + "\n")


def default_cache(environment: Mapping[str, str]) -> Path:
    """The file of digests: ``$XDG_CACHE_HOME/fleet/digests.jsonl``, else ``~/.cache/fleet/digests.jsonl``."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleet" / "digests.jsonl"


def report_files(
    catalogue: FileCatalogue, opened: Sequence[File], say: Callable[[int, tuple[DataFile, ...]], object], cache: Path
) -> None:  # fmt: skip
    """Report a data set's files and then, as they become known, their digests. It runs in a thread of low priority.

    Args:
        catalogue: the files.
        opened: the same files, as the data set has opened them.
        say: takes each record's files, with the number of the first.
        cache: of digests.
    """
    try:
        found = list(pieces(catalogue))
        for first, files in found:
            say(first, files)
        digests, left = Digests(cache), DIGEST_BYTES
        for first, files in found:
            hashed = []
            for number, file in enumerate(files, first):
                digest, read = _digest(file, opened[number], digests, left)
                left -= read
                hashed.append(replace(file, digest=digest))
            say(first, tuple(hashed))
    except OSError as error:
        log.info("the digests of the data's files end here: %s", error)


def _digest(file: DataFile, opened: File, digests: Digests, left: int) -> tuple[str, int]:
    """(digest, bytes that were read for it). It reads no file of a store."""
    if not is_local(opened):
        said = opened.system.info(opened.path)
        tag = next((str(said[name]).strip('"') for name in TAGS if said.get(name)), "")
        return (f"etag:{tag}" if tag else ""), 0
    if known := digests.known(file):
        return known, 0
    if file.size_bytes > left:
        return "", 0
    digest = _read(opened)
    if modified_s(opened) != file.modified_s:
        return "", file.size_bytes
    digests.keep(file, digest)
    return digest, file.size_bytes


def _read(opened: File) -> str:
    """The digest of a file. After each piece it pauses ``REST`` times as long as the piece took."""
    found = hashlib.sha256()
    with open(opened.path, "rb", buffering=0) as file:
        since_us = now_us()
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
            time.sleep(REST * (now_us() - since_us) / 1e6)
            since_us = now_us()
    return f"sha256:{found.hexdigest()}"
