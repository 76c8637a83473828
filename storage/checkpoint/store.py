"""Durable checkpoints: ``URL/checkpoints/ID/`` holds ``__0_0.distcp`` ..., ``.metadata`` and ``manifest.json``, which is put last.

Each rank writes its own part. Once all parts exist, the coordinator puts the index of ``torch.distributed.checkpoint``, then the manifest.
A checkpoint without a manifest does not exist. So a writer that dies in between leaves only files that the next
:meth:`CheckpointStore.retain` sweeps up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from fleet.protocol.holding import Tenure
from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.types import Part
from storage.backends.files import Files, open_files
from storage.backends.urls import redact
from storage.checkpoint.manifest import MANIFEST, CheckpointDamaged, Manifest, check_parts, decode_manifest, encode_manifest, safe_name
from storage.lock import CHECKPOINTS, SavesOf

if TYPE_CHECKING:
    from torch import Tensor

    from storage.checkpoint.layout import Piece

_log = logging.getLogger(__name__)


def checkpoint_files(url: str) -> Files:
    """The files of the checkpoints of ``url``."""
    return open_files(f"{url.rstrip('/')}/{CHECKPOINTS}")


def write_part(
    url: str, checkpoint: str, index: int, count: int, tensors: Iterable[tuple[int, Tensor] | Piece], epoch: int = 0
) -> Part:  # fmt: skip
    """Write part ``index`` of ``count`` and return its description; it is durable when this returns.

    ``tensors`` are (index in the training state, tensor), on any device, or rectangles of tensors. Of a view into larger storage, only the
    view is written. ``epoch`` is that of the run's holder.

    Raises:
        OSError: the store failed, or the checkpoint is committed already (FileExistsError).
    """
    from storage.checkpoint import dcp, layout

    if not 0 <= index < count:
        raise ValueError(f"part {index} of {count}")
    files = checkpoint_files(url)
    if files.size(f"{safe_name(checkpoint)}/{MANIFEST}") is not None:
        raise FileExistsError(f"checkpoint {checkpoint} is committed: its parts must not change")
    pieces = [layout.Piece.whole(*item) if isinstance(item, tuple) else item for item in tensors]
    return dcp.write_pieces(files, checkpoint, index, pieces, epoch)


class CheckpointStore:
    """A ``CheckpointPort`` over any fsspec URL.

    Args:
        run: name of the run; checkpoints of another run are refused. "" takes any.
        index: write the index of ``torch.distributed.checkpoint`` at the commit. Without it only Fleet can load the checkpoint.
        tenure: by which the run is held; None: checkpoints are committed without a lock.

    Methods raise OSError when the store fails.
    """

    def __init__(self, url: str, *, run: str = "", index: bool = True, tenure: Tenure | None = None) -> None:
        self.url, self.run, self._index = redact(url), run, index
        self._files = checkpoint_files(url)
        self._saves, self._epoch = SavesOf(url, tenure), tenure.epoch if tenure is not None else 0

    def commit(self, order: CommitCheckpoint) -> int:
        """Put the manifest, after every part was found with its size. Returns total bytes. A second commit of the same changes nothing.

        Raises:
            CheckpointDamaged: a part is missing, has another size, or does not fit the others.
            FileExistsError: the checkpoint is committed already, with other parts.
            TakenOver: another process holds the run now; nothing was written.
        """
        from storage.checkpoint import dcp, layout, restore

        checkpoint = safe_name(order.checkpoint)
        check_parts(checkpoint, order.parts)
        layout.check_cover(checkpoint, (entry for part in order.parts for entry in layout.decode_layout(checkpoint, part)))
        restore.check_sizes(self._files, checkpoint, order.parts)
        if self._committed(checkpoint):
            return self._again(order)
        written: list[Manifest] = []

        def put_manifest() -> bool:
            files = dcp.write_index(self._files, checkpoint, order.parts, order.meta, self._epoch) if self._index else ()
            written.append(Manifest(checkpoint, order.state, order.parts, order.meta, self.run, files, self._epoch))
            return self._files.create(f"{checkpoint}/{MANIFEST}", encode_manifest(written[-1]))

        return written[-1].bytes if self._saves.save(checkpoint, put_manifest) else self._again(order)

    def _again(self, order: CommitCheckpoint) -> int:
        there = self.manifest(order.checkpoint)
        if (there.state, there.parts, there.meta) != (order.state, order.parts, order.meta):
            raise FileExistsError(f"checkpoint {order.checkpoint} is committed already, with other parts")
        return there.bytes

    def list(self) -> tuple[str, ...]:
        """Ids of all committed checkpoints, oldest first."""
        return tuple(name for name in reversed(self._names()) if self._committed(name))

    def manifest(self, checkpoint: str) -> Manifest:
        """Raises CheckpointDamaged when it cannot be used, FileNotFoundError when the checkpoint does not exist."""
        return decode_manifest(checkpoint, self._files.read(f"{safe_name(checkpoint)}/{MANIFEST}"), self.run)

    def load(self, checkpoint: str, only: Callable[[str], Collection[int]] | None = None) -> tuple[str, dict[int, Tensor]]:
        """(meta, {index: tensor on the CPU}), each part compared with its SHA-256. ``only``: chooses tensors, from the meta; default all.

        Raises:
            CheckpointDamaged: names the part that is missing, cut short or altered.
        """
        from storage.checkpoint.restore import load_tensors

        manifest = self.manifest(checkpoint)
        wanted = only(manifest.meta) if only is not None else None
        return manifest.meta, load_tensors(self._files, checkpoint, manifest.parts, wanted)

    def verify(self, checkpoint: str) -> Manifest:
        """Read every file and compare it with its SHA-256, without keeping it. Raises like :meth:`load`."""
        from storage.checkpoint.restore import read_verified

        manifest = self.manifest(checkpoint)
        read_verified(self._files, checkpoint, manifest.all_files, {})
        return manifest

    def newest_valid(self) -> str | None:
        """Id of the newest checkpoint without a damaged file; newer ones are skipped with a warning that gives the reason."""
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
        """Delete the manifest first: a deletion that is cut short leaves no checkpoint, never half of one."""
        self._files.remove(f"{safe_name(checkpoint)}/{MANIFEST}")
        self._files.remove(checkpoint)

    def retain(self, keep: int, guarded: Collection[str] = ()) -> tuple[str, ...]:
        """Keep the newest ``keep`` checkpoints; delete older ones that are not ``guarded``, and unfinished files of older attempts.

        Returns the deleted ids. Files newer than the newest committed checkpoint stay: a rank may be writing them.
        """
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        names = self._names()
        committed = [name for name in names if self._committed(name)]
        kept = committed[:keep]
        doomed = [name for name in names if kept and name < kept[0] and name not in kept and name not in guarded]
        self._sweep(kept)
        for name in doomed:
            self.delete(name)
        return tuple(doomed)

    def _sweep(self, kept: Sequence[str]) -> None:
        """Remove files of dead writers in committed checkpoints, and in those older than the newest."""
        for name, remove in self._files.unfinished():
            if kept and name <= kept[0]:
                remove()

    # ---- inside ------------------------------------------------------------------------------------------------------------------------

    def _names(self) -> tuple[str, ...]:
        """Newest first, committed or not."""
        return tuple(sorted(self._files.directories(), reverse=True))

    def _committed(self, checkpoint: str) -> bool:
        return bool(self._files.size(f"{checkpoint}/{MANIFEST}"))  # an empty one keeps others from being put: there is no checkpoint
