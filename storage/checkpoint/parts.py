"""Durable checkpoints on one URL, for ranks and for the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleet.protocol.holding import Tenure
from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.levels import STORE, level_at
from fleet.protocol.types import Part, StateId
from storage.checkpoint.manifest import CheckpointDamaged, checkpoint_id, parse_checkpoint_id
from storage.checkpoint.store import CheckpointStore, write_part
from storage.lock import RunLock

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class Parts:
    """A rank's side: it writes its part, and reads whole checkpoints. ``run`` and ``tenure``: see
    :class:`storage.checkpoint.store.CheckpointStore`."""

    def __init__(self, url: str, run: str = "", tenure: Tenure | None = None) -> None:
        self.url, self.run, self._tenure = url, run, tenure

    def write(
        self, state: StateId, generation: int, index: int, count: int, tensors: Sequence[tuple[Any, ...]], place: str = ""
    ) -> tuple[str, Part]:  # fmt: skip
        """(id of the checkpoint, the written part). Raises OSError when the store, or a memory of ``place``, fails, and TakenOver.

        ``tensors`` are (index, tensor), or (index, rows of it, their offset, its shape).
        """
        from storage.checkpoint.layout import Piece

        checkpoint = checkpoint_id(state, generation)
        pieces = [Piece(*item) if len(item) == 4 else Piece.whole(*item) for item in tensors]
        if self._tenure is None or place:
            return checkpoint, write_part(place or self.url, checkpoint, index, count, pieces)
        RunLock(self.url).check(self._tenure)
        return checkpoint, write_part(self.url, checkpoint, index, count, pieces, self._tenure.epoch)

    def export(self, target: str, model: Mapping[str, Any]) -> str:
        """Write a model to one file; see :func:`storage.checkpoint.export.export_model`."""
        from storage.checkpoint.export import export_model

        return export_model(target, model)

    def load(self, checkpoint: str) -> tuple[str, list[Tensor]]:
        """(skeleton, tensors in order), of the store or, for a URL, of another level. Raises CheckpointDamaged with the bad part.

        On another level than the store it deletes a damaged checkpoint, so that no rank is sent to it again.
        """
        place, _, name = checkpoint.rpartition("/")
        own = level_at(place) != STORE  # else it is another run's, from which this run goes on
        store = CheckpointStore(place or self.url, run=self.run if own or not place else "")
        try:
            meta, tensors = store.load(name)
        except (CheckpointDamaged, FileNotFoundError):
            if own:
                store.delete(name)
            raise
        return meta, [tensors[index] for index in range(len(tensors))]


class RetainingStore:
    """The coordinator's side: a ``CheckpointPort`` that keeps the last ``keep`` checkpoints; in memories the last one."""

    def __init__(self, url: str, keep: int, run: str = "", tenure: Tenure | None = None) -> None:
        self._store, self._keep, self._run = CheckpointStore(url, run=run, tenure=tenure), keep, run

    def commit(self, order: CommitCheckpoint) -> int:
        """Returns total bytes. It then deletes older checkpoints; when that fails, the new checkpoint still counts."""
        store, keep = (CheckpointStore(order.place, run=self._run, index=False), 1) if order.place else (self._store, self._keep)
        size = store.commit(order)
        try:
            store.retain(keep, order.guarded)
        except OSError as error:
            _log.warning("checkpoint %s is committed; older ones were not deleted, and will be after the next: %s", order.checkpoint, error)
        return size


def newest_checkpoint(url: str, run: str = "") -> tuple[str, StateId] | None:
    """Id and state of the newest checkpoint with all files sound, or None."""
    checkpoint = CheckpointStore(url, run=run).newest_valid()
    return None if checkpoint is None else (checkpoint, parse_checkpoint_id(checkpoint)[0])
