"""The places of tensors in a part's file, as text: a rank knows them after its write, and commit and restore need them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from fleet.protocol.types import Part
from storage.checkpoint.manifest import CheckpointDamaged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of tensor ``index``: ``tensor`` lies at ``offsets`` in the whole, which has ``shape``."""

    index: int
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, index: int, tensor: Tensor) -> Piece:
        """All of tensor ``index``."""
        return cls(index, tensor, (0,) * tensor.ndim, tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes ``offset`` to ``offset + length`` of the file hold a rectangle, as ``torch.save`` writes it.

    Its elements begin at ``payload``, as they are in memory; -1 where that is unknown. ``dtype`` is its name in ``torch``.
    """

    index: int
    offset: int
    length: int
    payload: int
    dtype: str
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape


def encode_layout(entries: Iterable[Entry]) -> str:
    """JSON."""
    return json.dumps([astuple(entry) for entry in entries], separators=(",", ":"))


def decode_layout(checkpoint: str, part: Part) -> list[Entry]:
    """Inverse of :func:`encode_layout`. Raises CheckpointDamaged when it is no layout, or not that of the part's tensors."""
    try:
        rows = json.loads(part.layout)
        found = [Entry(*row[:5], *(tuple(map(int, numbers)) for numbers in row[5:])) for row in rows]
    except (ValueError, TypeError) as error:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the layout of {part.name} cannot be read: {error}") from error
    if tuple(entry.index for entry in found) != part.tensors:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the layout of {part.name} is not that of tensors {part.tensors}")
    if any(not len(entry.offsets) == len(entry.sizes) == len(entry.shape) for entry in found):
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the layout of {part.name} does not fit its tensors' shapes")
    if any(entry.offset < 0 or entry.offset + entry.length > part.bytes for entry in found):
        raise CheckpointDamaged(f"checkpoint {checkpoint}: the layout of {part.name} leads out of the file")
    return found


def check_cover(checkpoint: str, entries: Iterable[Entry]) -> None:
    """Raises CheckpointDamaged when the rectangles of a tensor overlap, leave a hole, or are not of one tensor."""
    by_tensor: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_tensor[entry.index].append(entry)
    for index, found in by_tensor.items():
        if len({(entry.shape, entry.dtype) for entry in found}) > 1:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: the parts disagree about shape or type of tensor {index}")
        if not all(_inside(entry) for entry in found) or _overlap(found):
            raise CheckpointDamaged(f"checkpoint {checkpoint}: tensor {index} is in two parts")
        if sum(math.prod(entry.sizes) for entry in found) != math.prod(found[0].shape):
            raise CheckpointDamaged(f"checkpoint {checkpoint}: part of tensor {index} is missing")


def _inside(entry: Entry) -> bool:
    ends = zip(entry.offsets, entry.sizes, entry.shape, strict=True)
    return all(0 <= start and start + size <= whole for start, size, whole in ends)


def _overlap(entries: Sequence[Entry]) -> bool:
    """Whether two rectangles share an element. Sorted along the first axis: ranks' chunks are rows, so few are compared."""
    ordered = sorted(entries, key=lambda entry: entry.offsets)
    for at, one in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            if _meet(one, other):
                return True
    return False


def _meet(one: Entry, other: Entry) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)
