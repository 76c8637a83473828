"""The durable format: that of ``torch.distributed.checkpoint`` (DCP), written by DCP's own writer and planner.

A rank writes ``__R_0.distcp``, of which DCP's index needs only offsets. The commit names the tensors and writes the index, ``.metadata``,
together with one more file for all values that are not tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fleet.protocol.types import Part
from storage.backends.blocks import PIECE_BYTES, BlockStream
from storage.backends.files import Files
from storage.checkpoint.layout import Entry, Piece, decode_layout, encode_layout
from storage.checkpoint.manifest import METADATA
from storage.checkpoint.names import TensorRef, named, refs

# torch.load compares no CRC, and the store has a digest of its own; to compute them halves the rate of torch.save.
_NO_CRC = {"save.compute_crc32": False}


def file_name(index: int, epoch: int = 0) -> str:
    """The one file of writer ``index``, by its name in DCP. Holders of a run, each with its ``epoch``, do not write each other's files."""
    return f"__{index}_{epoch}.distcp"


def write_pieces(files: Files, directory: str, index: int, pieces: Sequence[Piece], epoch: int = 0) -> Part:
    """Write part ``index``; durable when this returns. Raises OSError."""
    name = file_name(index, epoch)
    planner = _PiecePlanner(pieces)
    stable = [(piece.tensor.data_ptr(), piece.tensor.nbytes) for piece in pieces if piece.tensor.is_cpu and piece.tensor.is_contiguous()]
    with files.writing(f"{directory}/{name}") as sink, BlockStream(sink, stable) as stream:
        results = _write(planner, index, stream)
        size, digest = stream.finish()
    entries = [_entry(pieces[int(result.index.fqn)], result, stream.pieces) for result in results]
    return Part(name, size, digest, tuple(entry.index for entry in entries), encode_layout(entries))


def _entry(piece: Piece, result: WriteResult, large: dict[int, int]) -> Entry:
    stored, size = result.storage_data, piece.tensor.nbytes
    inside = [at for at, count in large.items() if stored.offset <= at < stored.offset + stored.length and count == size]
    payload = inside[0] if size >= PIECE_BYTES and len(inside) == 1 else -1
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    return Entry(piece.index, stored.offset, stored.length, payload, dtype, tuple(piece.tensor.shape), piece.offsets, piece.shape)


def write_index(files: Files, checkpoint: str, parts: Sequence[Part], meta: str, epoch: int = 0) -> tuple[Part, ...]:
    """Write the values that are not tensors, if there are any, and then ``.metadata``. Returns the written parts. Raises OSError."""
    entries = [(part.name, entry) for part in parts for entry in decode_layout(checkpoint, part)]
    state = named(meta, [entry for _, entry in entries])
    planner = DefaultSavePlanner()
    numbers: dict[int, int] = {}
    planner.set_up_planner(_on_meta(state, {entry.index: entry for _, entry in entries}, numbers), is_coordinator=True)
    plan = planner.create_local_plan()
    _, metadata = planner.create_global_plan([plan])
    chunks = _chunks(planner.state_dict, numbers, metadata, entries)
    values = _ValuePlanner(planner, plan)
    written = []
    if values.create_local_plan().items:
        name = file_name(len(parts), epoch)
        with files.writing(f"{checkpoint}/{name}") as sink, BlockStream(sink) as stream:
            chunks += _write(values, len(parts), stream)
            written = [Part(name, *stream.finish(), ())]
    with files.writing(f"{checkpoint}/{METADATA}") as sink, BlockStream(sink) as stream:
        writer = _Writer(stream)
        writer.save_id = checkpoint
        writer.finish(metadata, [chunks])
        written.append(Part(METADATA, *stream.finish(), ()))
    return tuple(written)


def _on_meta(state: Any, entries: dict[int, Entry], numbers: dict[int, int]) -> Any:
    """The state with tensors that have a shape and a type, but no memory. ``numbers`` gets the index of each, by its ``id()``."""
    if isinstance(state, TensorRef):
        entry = entries[state.index]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        numbers[id(tensor)] = state.index
        return tensor
    if isinstance(state, dict):
        return {key: _on_meta(value, entries, numbers) for key, value in state.items()}
    if isinstance(state, list) or (isinstance(state, tuple) and refs(state)):  # DCP looks for tensors in lists, not in tuples
        return [_on_meta(value, entries, numbers) for value in state]
    return state


def _chunks(flat: dict[str, Any], numbers: dict[int, int], metadata: Metadata, entries: Sequence[tuple[str, Entry]]) -> list[WriteResult]:
    """The places of each tensor's rectangles, under its name; they are added to ``metadata``."""
    held: dict[int, list[tuple[str, Entry]]] = {}
    for name, entry in entries:
        held.setdefault(entry.index, []).append((name, entry))
    results = []
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            found = held[numbers[id(value)]]
            described = metadata.state_dict_metadata[key]
            assert isinstance(described, TensorStorageMetadata)
            described.chunks = [ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)) for _, entry in found]
            results += [_stored(MetadataIndex(key, entry.offsets, number), name, entry) for number, (name, entry) in enumerate(found)]
    return results


def _stored(index: MetadataIndex, name: str, entry: Entry) -> WriteResult:
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # FileSystemReader expects it from the writer of its index

    return WriteResult(index, entry.length, _StorageInfo(name, entry.offset, entry.length))


# ---- DCP's extension points --------------------------------------------------------------------------------------------------------------


def _write(planner: DefaultSavePlanner, index: int, stream: BlockStream) -> list[WriteResult]:
    """Let DCP's writer write the plan of ``planner``, as rank ``index``, into ``stream``."""
    from torch.utils.serialization import config

    writer = _Writer(stream)
    writer.set_up_storage_writer(True, rank=index, use_collectives=False)
    with config.patch(_NO_CRC):  # type: ignore[attr-defined]  # torch adds it when the module is imported
        return list(writer.write_data(writer.prepare_local_plan(planner.create_local_plan()), planner).value())


class _Writer(FileSystemWriter):
    """DCP's writer, into one stream. :class:`storage.backends.files.Files` makes the file durable."""

    def __init__(self, stream: BlockStream) -> None:
        super().__init__("", single_file_per_rank=True, sync_files=False, thread_count=1)
        self.fs = _OneStream(stream)  # type: ignore[assignment]  # torch declares the one kind that it makes itself


class _OneStream(FileSystemBase):
    def __init__(self, stream: BlockStream) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        yield self._stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The stream has its name already."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The stream has its directory already."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """There is no earlier file, see :meth:`exists`."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _PiecePlanner(DefaultSavePlanner):
    """Plans pieces under their number."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(str(number), piece) for number, piece in enumerate(self._pieces)])

    @staticmethod
    def _item(key: str, piece: Piece) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.tensor.shape))
        data = TensorWriteData(chunk, TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.shape))
        return WriteItem(MetadataIndex(key, piece.offsets), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._pieces[int(index.fqn)].tensor.detach().contiguous()


class _ValuePlanner(DefaultSavePlanner):
    """Plans the items of ``planner``, without the tensors."""

    def __init__(self, planner: DefaultSavePlanner, plan: SavePlan) -> None:
        super().__init__()
        self._items = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        self.state_dict, self.mappings = planner.state_dict, planner.mappings

    def create_local_plan(self) -> SavePlan:
        return SavePlan(list(self._items))
