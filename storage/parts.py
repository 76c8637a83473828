"""Durable checkpoints as ranks and the coordinator use them, on one URL."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fleet.instructions import CommitCheckpoint
from fleet.types import Part, StateId
from storage.checkpoint import CheckpointStore, write_part
from storage.manifest import checkpoint_id, parse_checkpoint_id

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class Parts:
    """A rank's end: writes its part, reads whole checkpoints. ``run`` as for :class:`storage.checkpoint.CheckpointStore`."""

    def __init__(self, url: str, run: str = "", **options: Any) -> None:
        self.url, self.run, self._options = url, run, options

    def write(self, state: StateId, generation: int, index: int, count: int, tensors: list[tuple[int, Tensor]]) -> tuple[str, Part]:
        """(id of the checkpoint, the part as written). Raises OSError when the store fails."""
        checkpoint = checkpoint_id(state, generation)
        return checkpoint, write_part(self.url, checkpoint, index, count, tensors, **self._options)

    def load(self, checkpoint: str) -> tuple[str, list[Tensor]]:
        """(skeleton, tensors in order). Raises CheckpointDamaged naming the bad part."""
        meta, tensors = CheckpointStore(self.url, run=self.run, **self._options).load(checkpoint)
        return meta, [tensors[index] for index in range(len(tensors))]


class RetainingStore:
    """The coordinator's end: a ``CheckpointPort`` that keeps the last ``keep`` checkpoints."""

    def __init__(self, url: str, keep: int, run: str = "", **options: Any) -> None:
        self._store, self._keep = CheckpointStore(url, run=run, **options), keep

    def commit(self, order: CommitCheckpoint) -> int:
        """Total bytes. What is old is deleted then; a store that fails in that has the checkpoint all the same."""
        size = self._store.commit(order)
        try:
            self._store.retain(self._keep)
        except OSError as error:
            _log.warning("checkpoint %s is committed; older ones were not deleted, and will be after the next: %s", order.checkpoint, error)
        return size

    def newest(self) -> str | None:
        return self._store.newest()


def newest_checkpoint(url: str, run: str = "", **options: Any) -> tuple[str, StateId] | None:
    """Id and state of the newest checkpoint whose files are all sound, or None."""
    checkpoint = CheckpointStore(url, run=run, **options).newest_valid()
    return None if checkpoint is None else (checkpoint, parse_checkpoint_id(checkpoint)[0])
