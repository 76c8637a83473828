"""Bytes of parts back into tensors: several threads read them into place, and compare their digests."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from fleet.protocol.types import Part
from storage.backends.blocks import BlockReader, Extents, SharedReader, digest_of
from storage.backends.files import Files
from storage.checkpoint.layout import Entry, check_cover, decode_layout
from storage.checkpoint.manifest import CheckpointDamaged

if TYPE_CHECKING:
    from torch import Tensor


class Room:
    """Memory for one rectangle: only its elements where their place is known, else all bytes of ``torch.save``."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        count = entry.length if entry.payload < 0 else math.prod(entry.sizes) * _type(entry.dtype).itemsize
        self._memory = np.empty(count, dtype=np.uint8)  # numpy asks for huge pages; touching small ones costs more than the disk

    @property
    def extent(self) -> tuple[int, memoryview]:
        return (self.entry.offset if self.entry.payload < 0 else self.entry.payload), self._memory.data

    def tensor(self) -> Tensor:
        import torch

        if self.entry.payload < 0:
            loaded: Tensor = torch.load(io.BytesIO(self._memory.tobytes()), map_location="cpu", weights_only=True)
            return loaded
        return torch.from_numpy(self._memory).view(_type(self.entry.dtype)).view(self.entry.sizes)


def _type(name: str):  # type: ignore[no-untyped-def]
    import torch

    return getattr(torch, name)


def load_tensors(files: Files, checkpoint: str, parts: Iterable[Part], only: Collection[int] | None = None) -> dict[int, Tensor]:
    """{index: tensor on the CPU}. ``only``: other tensors take no memory, though all are read and compared.

    Raises CheckpointDamaged naming the part that is missing, cut short or altered, OSError.
    """
    parts = tuple(parts)
    entries = {part.name: decode_layout(checkpoint, part) for part in parts}
    check_cover(checkpoint, (entry for found in entries.values() for entry in found))
    rooms = {name: [Room(entry) for entry in found if only is None or entry.index in only] for name, found in entries.items()}
    read_verified(files, checkpoint, parts, {name: Extents(room.extent for room in found) for name, found in rooms.items()})
    return _assembled(room for part in parts for room in rooms[part.name])


def read_verified(files: Files, checkpoint: str, parts: Iterable[Part], into: dict[str, Extents]) -> None:
    """Read every file of ``parts``, keep the bytes that ``into`` has room for, and compare its digest. Raises like :func:`load_tensors`."""
    parts = tuple(parts)
    check_sizes(files, checkpoint, parts)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(_opened(files, checkpoint, part)) for part in parts]
        reading = stack.enter_context(BlockReader())  # entered last, so that all threads have ended when files are closed
        begun = [reading.start(reader, part.bytes, into.get(part.name) or Extents()) for part, reader in zip(parts, readers, strict=True)]
        for part, blocks in zip(parts, begun, strict=True):
            with _named(checkpoint, part):
                digest = digest_of(block.result() for block in blocks)
            if digest != part.sha256:
                raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} does not match its SHA-256")


@contextlib.contextmanager
def _opened(files: Files, checkpoint: str, part: Part) -> Iterator[SharedReader]:
    with contextlib.ExitStack() as stack:
        with _named(checkpoint, part):
            reader = stack.enter_context(files.reading(f"{checkpoint}/{part.name}"))
        yield reader


@contextlib.contextmanager
def _named(checkpoint: str, part: Part) -> Iterator[None]:
    try:
        yield
    except (EOFError, FileNotFoundError) as error:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} went away while it was read: {error}") from error


def check_sizes(files: Files, checkpoint: str, parts: Iterable[Part]) -> None:
    """Raises CheckpointDamaged when a file is missing, or has another size than was written."""
    sizes = files.sizes(checkpoint)
    for part in parts:
        if part.name not in sizes:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} is missing")
        if sizes[part.name] != part.bytes:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} has {sizes[part.name]} bytes, {part.bytes} were written")


def _assembled(rooms: Iterable[Room]) -> dict[int, Tensor]:
    import torch

    tensors: dict[int, Tensor] = {}
    for room in rooms:
        entry, tensor = room.entry, room.tensor()
        if entry.is_whole:
            tensors[entry.index] = tensor
            continue
        whole = tensors.setdefault(entry.index, torch.empty(entry.shape, dtype=tensor.dtype, device="cpu"))
        whole[tuple(slice(start, start + size) for start, size in zip(entry.offsets, entry.sizes, strict=True))] = tensor
    return tensors
