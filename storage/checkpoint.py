"""Plain durable checkpoints: ``URL/checkpoints/ID/part-00000-of-00004.pt`` ... and ``manifest.json``, which is put last.

Ranks write parts, each its own; the coordinator puts the manifest once all are there. A checkpoint without a manifest does not exist, so
whoever dies in between leaves nothing but files that the next :meth:`CheckpointStore.retain` sweeps up.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from fleet.instructions import CommitCheckpoint
from fleet.types import Part
from storage.files import Files, open_files
from storage.manifest import MANIFEST, CheckpointDamaged, Manifest, check_parts, decode_manifest, encode_manifest, part_name, safe_name

if TYPE_CHECKING:
    from torch import Tensor

DIRECTORY = "checkpoints"
CHUNK_BYTES = 1 << 22

_log = logging.getLogger(__name__)


def write_part(url: str, checkpoint: str, index: int, count: int, tensors: Iterable[tuple[int, Tensor]], **options: Any) -> Part:
    """Write part ``index`` of ``count`` and return what it is; durable when this returns.

    ``tensors`` are (index in the training state, tensor), on any device; a view into larger storage is written as itself alone.

    Raises:
        OSError: the store failed, or the checkpoint is committed already (FileExistsError).
    """
    import torch

    files = _files(url, options)
    if files.size(f"{safe_name(checkpoint)}/{MANIFEST}") is not None:
        raise FileExistsError(f"checkpoint {checkpoint} is committed: its parts must not change")
    held = {number: _alone(tensor) for number, tensor in tensors}
    name = part_name(index, count)
    with files.writing(f"{checkpoint}/{name}") as file:
        hashing = _Hashing(file)
        torch.save(held, hashing)
    return Part(name, hashing.bytes, hashing.digest.hexdigest(), tuple(held))


class CheckpointStore:
    """A ``CheckpointPort`` over any fsspec URL. ``options`` go to fsspec. Methods raise OSError when the store fails."""

    def __init__(self, url: str, **options: Any) -> None:
        self._files = _files(url, options)

    def commit(self, order: CommitCheckpoint) -> int:
        """Put the manifest, after every part was found with its size. Returns total bytes. To commit the same again changes nothing.

        Raises:
            CheckpointDamaged: a part is missing or has another size.
            FileExistsError: the checkpoint is committed already, with other parts.
        """
        check_parts(order.checkpoint, order.parts)
        manifest = Manifest(order.checkpoint, order.state, order.parts, order.meta)
        for part in order.parts:
            self._check_size(order.checkpoint, part)
        name, data = f"{safe_name(order.checkpoint)}/{MANIFEST}", encode_manifest(manifest)
        if self._files.size(name) is None:
            with self._files.writing(name) as file:
                file.write(data)
        elif self._read(name) != data:
            raise FileExistsError(f"checkpoint {order.checkpoint} is committed already, with other parts")
        return manifest.bytes

    def newest(self) -> str | None:
        """Id of the newest committed checkpoint, damaged or not."""
        return next((name for name in self._names() if self._committed(name)), None)

    def list(self) -> tuple[str, ...]:
        """Ids of all committed checkpoints, oldest first."""
        return tuple(name for name in reversed(self._names()) if self._committed(name))

    def manifest(self, checkpoint: str) -> Manifest:
        """Raises CheckpointDamaged when it cannot be read, FileNotFoundError when the checkpoint does not exist."""
        return decode_manifest(checkpoint, self._read(f"{safe_name(checkpoint)}/{MANIFEST}"))

    def load(self, checkpoint: str) -> tuple[str, dict[int, Tensor]]:
        """(meta, {index: tensor on the CPU}), each part compared with its SHA-256 first.

        Raises:
            CheckpointDamaged: names the part that is missing, cut short or altered.
        """
        manifest, tensors = self.manifest(checkpoint), dict[int, "Tensor"]()
        for part in manifest.parts:
            tensors.update(_loaded(checkpoint, part, self._verified(checkpoint, part)))
        return manifest.meta, tensors

    def verify(self, checkpoint: str) -> Manifest:
        """Read every part and compare it with its SHA-256, without keeping it. Raises like :meth:`load`."""
        manifest = self.manifest(checkpoint)
        for part in manifest.parts:
            self._digest(checkpoint, part, None)
        return manifest

    def newest_valid(self) -> str | None:
        """Id of the newest checkpoint whose every part is undamaged; newer ones are passed over with a warning that says why."""
        for name in self._names():
            if self._committed(name):
                try:
                    self.verify(name)
                except CheckpointDamaged as error:
                    _log.warning("passed over: %s", error)
                else:
                    return name
        return None

    def delete(self, checkpoint: str) -> None:
        """The manifest first: a deletion that is cut short leaves no checkpoint, never half of one."""
        self._files.remove(f"{safe_name(checkpoint)}/{MANIFEST}")
        self._files.remove(checkpoint)

    def retain(self, keep: int) -> tuple[str, ...]:
        """Keep the newest ``keep`` checkpoints; delete older ones and what older attempts left unfinished. Returns the ids deleted.

        What is newer than the newest committed checkpoint is left alone: it may be one that is being written.
        """
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        kept = 0
        doomed: tuple[str, ...] = ()
        for name in self._names():
            committed = self._committed(name)
            if (committed and kept >= keep) or (kept and not committed):
                doomed = (*doomed, name)
            kept += committed
        for name in doomed:
            self.delete(name)
        return doomed

    # ---- inside ------------------------------------------------------------------------------------------------------------------------

    def _names(self) -> tuple[str, ...]:
        """Newest first, committed or not."""
        return tuple(sorted(self._files.directories(), reverse=True))

    def _committed(self, checkpoint: str) -> bool:
        return self._files.size(f"{checkpoint}/{MANIFEST}") is not None

    def _read(self, name: str) -> bytes:
        with self._files.read(name) as file:
            return file.read()

    def _check_size(self, checkpoint: str, part: Part) -> None:
        size = self._files.size(f"{safe_name(checkpoint)}/{safe_name(part.name)}")
        if size is None:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} is missing")
        if size != part.bytes:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} has {size} bytes, {part.bytes} were written")

    def _verified(self, checkpoint: str, part: Part) -> io.BytesIO:
        data = io.BytesIO()
        self._digest(checkpoint, part, data)
        data.seek(0)
        return data

    def _digest(self, checkpoint: str, part: Part, copy: io.BytesIO | None) -> None:
        self._check_size(checkpoint, part)
        digest = hashlib.sha256()
        with self._files.read(f"{checkpoint}/{part.name}") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                if copy is not None:
                    copy.write(chunk)
        if digest.hexdigest() != part.sha256:
            raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} does not match its SHA-256")


class _Hashing:
    """A file that is only written to, in order, with a running digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _files(url: str, options: Mapping[str, Any]) -> Files:
    return open_files(f"{url.rstrip('/')}/{DIRECTORY}", **options)


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, and without the rest of the storage that it may be a view into, which torch.save would write too."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _loaded(checkpoint: str, part: Part, data: io.BytesIO) -> dict[int, Tensor]:
    import torch

    tensors: dict[int, Tensor] = torch.load(data, map_location="cpu", weights_only=True)
    if tuple(tensors) != part.tensors:
        raise CheckpointDamaged(f"checkpoint {checkpoint}: {part.name} holds tensors {tuple(tensors)}, the manifest says {part.tensors}")
    return tensors
