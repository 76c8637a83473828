"""The part of a checkpoint that one rank of a column writes: tensors of its column, in their places in the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.rank.state.tracked import Flat, Slice, TrackedState, slices
from fleet.protocol.types import Coordinate


class ColumnTensors:
    """The ranks of a column divide its tensors among them. A tensor that all columns have whole is the first column's.

    Args:
        rank, size: of this rank within its column. ``index``, ``count``: within the view.
    """

    def __init__(self, state: TrackedState, coordinate: Coordinate, rank: int, size: int, index: int, count: int) -> None:
        self.state, self.index, self.count = state, index, count
        self._rank, self._size = rank, size
        self._first = not any(place for _, place in coordinate)
        self._flat: Flat | None = None

    def flat(self) -> Flat:
        self._flat = self.state.flat()
        return self._flat

    def items(self, tensors: Sequence[torch.Tensor]) -> list[Slice]:
        assert self._flat is not None
        divided = self._flat.divided
        mine = [number for number in range(len(tensors)) if self._first or number in divided]
        found = []
        for number, rows, offsets, shape in slices([tensors[number] for number in mine], self._size)[self._rank]:
            where = divided.get(mine[number])
            begins = offsets if where is None else tuple(map(sum, zip(where.offsets, offsets, strict=True)))
            found.append((mine[number], rows, begins, shape if where is None else where.shape))
        return found
