"""A random order for samples that can only be read in groups, such as row groups of Parquet files: each group is read few times. Its memory
does not grow with the number of samples: like the plain order it is a pure function of seed and position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.rank.data.sampling import permuted_many, stretches
from fleet.simulation.rng import derive_seed

EPOCHS = 2
"""So many layouts are remembered: a batch may reach over the end of an epoch."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """One epoch, by group in its order: the number of its first sample, its last position plus one. ``window_ends``: the same of each
    window."""

    firsts: np.ndarray
    ends: np.ndarray
    window_ends: np.ndarray


class Windows:
    """In each epoch the groups come in a random order. Groups of ``window_bytes`` together are a window, whose samples come in random
    order.

    Args:
        sizes: samples of each group.
        weights: bytes of each group, as far as they are known.
        window_bytes: a window ends where the next group would begin beyond this size, so it has at least one group.
    """

    def __init__(self, sizes: np.ndarray, weights: np.ndarray, window_bytes: int) -> None:
        self._sizes, self._weights, self._window_bytes = sizes, weights, window_bytes
        self._firsts = np.cumsum(sizes) - sizes
        self._length = int(sizes.sum())
        self._layouts: dict[tuple[int, int], _Layout] = {}

    def indices(self, seed: int, first: int, count: int) -> list[int]:
        """The samples at ``count`` positions from ``first`` on; positions count through all epochs."""
        return [index for epoch, start, stop in stretches(first, count, self._length) for index in self._within(seed, epoch, start, stop)]

    def _within(self, seed: int, epoch: int, start: int, stop: int) -> list[int]:
        layout, found = self._layout(seed, epoch), []
        while start < stop:
            window = int(np.searchsorted(layout.window_ends, start, side="right"))
            begin, end = int(layout.window_ends[window - 1]) if window else 0, int(layout.window_ends[window])
            here = np.arange(start - begin, min(stop, end) - begin, dtype=np.uint64)
            mixed = permuted_many(derive_seed(seed, "window", window), epoch, here, end - begin).astype(np.int64) + begin
            found += self._samples(layout, mixed)
            start = end
        return found

    def _samples(self, layout: _Layout, rows: np.ndarray) -> list[int]:
        """Rows of the epoch, its groups laid end to end -> samples."""
        group = np.searchsorted(layout.ends, rows, side="right")
        before = np.where(group > 0, layout.ends[group - 1], 0)
        return list(map(int, layout.firsts[group] + rows - before))

    def _layout(self, seed: int, epoch: int) -> _Layout:
        known = self._layouts.get((seed, epoch))
        if known is None:
            known = self._lay_out(seed, epoch)
            self._layouts = dict(list(self._layouts.items())[1 - EPOCHS :]) | {(seed, epoch): known}
        return known

    def _lay_out(self, seed: int, epoch: int) -> _Layout:
        order = np.arange(len(self._sizes), dtype=np.uint64)
        order = permuted_many(derive_seed(seed, "groups"), epoch, order, len(order)).astype(np.int64)
        ends, weights = np.cumsum(self._sizes[order]), self._weights[order]
        number = (np.cumsum(weights) - weights) // self._window_bytes
        last = np.append(number[1:] != number[:-1], True)
        return _Layout(self._firsts[order], ends, ends[last])
