"""Samples that can be read only in groups: a group is loaded when one of its samples is needed, and kept for those needed soon."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np

from actors.rank.data.catalogue import Place
from actors.rank.data.readers import File, Grouped, shown
from actors.rank.data.windows import Windows

Span = tuple[File, int, int]
"""(file, first byte, the byte after the last)."""


class Groups:
    """The samples of files whose records are :class:`Grouped`.

    Args:
        read: reads the bytes of several spans at once.
        window_bytes: see :class:`Windows`. Two windows are kept loaded, the current and the next.
    """

    def __init__(
        self, files: Sequence[File], records: Sequence[Grouped], read: Callable[[Sequence[Span]], list[bytes]], window_bytes: int
    ) -> None:
        self._files, self._records, self._read = files, records, read
        self._where = [(file, group) for file, one in enumerate(records) for group in range(len(one.sizes))]
        sizes = np.array([size for one in records for size in one.sizes], np.int64)
        weights = np.array([records[file].weight(group) for file, group in self._where], np.int64)
        self._ends = np.cumsum(sizes)
        self.order = Windows(sizes, weights, window_bytes)
        self._loaded = Cache(self._load, 2 * (window_bytes + int(weights.max())))

    def get(self, indices: Sequence[int]) -> list[Any]:
        """These samples; groups that are not loaded come in one request to the store."""
        places = self._places(indices)
        wanted: dict[int, list[int]] = {}
        for number, (group, _) in enumerate(places):
            wanted.setdefault(group, []).append(number)
        found: list[Any] = [None] * len(places)
        for group, value in self._loaded.get(wanted).items():
            samples = self._pick(group, value, [places[number][1] for number in wanted[group]])
            for number, sample in zip(wanted[group], samples, strict=True):
                found[number] = sample
        return found

    def place(self, path: str, file: int, index: int, record: int) -> Place:
        """The place of a sample in its file: the bytes of its group, and its row in the group."""
        ((group, row),) = self._places([index])
        spans = self._records[file].spans(self._where[group][1])
        begin, end = min(start for start, _ in spans), max(stop for _, stop in spans)
        return Place(shown(path), record, begin, end - begin, self._where[group][1], row)

    def _pick(self, group: int, value: Any, rows: Sequence[int]) -> list[Any]:
        file, here = self._where[group]
        try:
            return self._records[file].pick(value, rows)
        except Exception as error:
            error.add_note(f"in row group {here} of {shown(self._files[file].path)}")
            raise

    def _places(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """(group, row in it) of each sample."""
        groups = [int(group) for group in np.searchsorted(self._ends, np.array(indices), side="right")]
        return [(group, index - (int(self._ends[group - 1]) if group else 0)) for group, index in zip(groups, indices, strict=True)]

    def _load(self, groups: Sequence[int]) -> list[Any]:
        places = [self._where[group] for group in groups]
        spans = [self._records[file].spans(group) for file, group in places]
        data = self._read([(self._files[file], *span) for (file, _), some in zip(places, spans, strict=True) for span in some])
        cuts = [0, *accumulate(map(len, spans))]
        return [self._records[file].load(group, data[cuts[n] : cuts[n + 1]]) for n, (file, group) in enumerate(places)]


class Cache:
    """Loaded values, up to a total size; the least recently used are dropped first. Several threads may ask.

    Args:
        load: several keys -> their values, each with its size as ``nbytes``.
        limit_bytes: of all kept values; the newest value always stays.
    """

    def __init__(self, load: Callable[[Sequence[int]], list[Any]], limit_bytes: int) -> None:
        self._load, self._limit_bytes = load, limit_bytes
        self._lock = Lock()
        self._kept: OrderedDict[int, Future[Any]] = OrderedDict()

    def get(self, keys: Iterable[int]) -> dict[int, Any]:
        """Key -> value. Waits for values that another thread loads. Each thread loads its own values first, so there is no deadlock."""
        mine: dict[int, Future[Any]] = {}
        found: dict[int, Future[Any]] = {}
        with self._lock:
            for key in keys:
                if key not in self._kept:
                    self._kept[key] = mine[key] = Future()
                self._kept.move_to_end(key)
                found[key] = self._kept[key]
        if mine:
            self._fill(mine)
        return {key: future.result() for key, future in found.items()}

    def _fill(self, mine: dict[int, Future[Any]]) -> None:
        try:
            values = self._load(list(mine))
        except BaseException as error:
            with self._lock:
                for key in mine:
                    del self._kept[key]
            for future in mine.values():
                future.set_exception(error)
            raise
        for future, value in zip(mine.values(), values, strict=True):
            future.set_result(value)
        with self._lock:
            self._shrink()

    def _shrink(self) -> None:
        loaded = {key: future.result().nbytes for key, future in self._kept.items() if future.done()}
        excess = sum(loaded.values()) - self._limit_bytes
        for key, size in list(loaded.items())[:-1]:
            if excess <= 0:
                return
            del self._kept[key]
            excess -= size

    def __getstate__(self) -> tuple[Any, ...]:
        """Pickled without values: a lock cannot be pickled, and values can be loaded again."""
        return self._load, self._limit_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]
