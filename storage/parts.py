"""Durable checkpoints as ranks and the coordinator use them, on one URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.instructions import CommitCheckpoint
from fleet.types import Part, StateId
from storage.checkpoint import CheckpointStore, write_part
from storage.manifest import checkpoint_id, parse_checkpoint_id

if TYPE_CHECKING:
    from torch import Tensor


class Parts:
    """A rank's end: writes its part, reads whole checkpoints."""

    def __init__(self, url: str) -> None:
        self.url = url

    def write(self, state: StateId, generation: int, index: int, count: int, tensors: list[tuple[int, Tensor]]) -> tuple[str, Part]:
        """(id of the checkpoint, the part as written). Raises OSError when the store fails."""
        checkpoint = checkpoint_id(state, generation)
        return checkpoint, write_part(self.url, checkpoint, index, count, tensors)

    def load(self, checkpoint: str) -> tuple[str, list[Tensor]]:
        """(skeleton, tensors in order). Raises CheckpointDamaged naming the bad part."""
        meta, tensors = CheckpointStore(self.url).load(checkpoint)
        return meta, [tensors[index] for index in range(len(tensors))]


class RetainingStore:
    """The coordinator's end: a ``CheckpointPort`` that keeps the last ``keep`` checkpoints."""

    def __init__(self, url: str, keep: int) -> None:
        self._store, self._keep = CheckpointStore(url), keep

    def commit(self, order: CommitCheckpoint) -> int:
        size = self._store.commit(order)
        self._store.retain(self._keep)
        return size

    def newest(self) -> str | None:
        return self._store.newest()


def newest_checkpoint(url: str) -> tuple[str, StateId] | None:
    """Id and state of the newest checkpoint whose parts are all sound, or None."""
    checkpoint = CheckpointStore(url).newest_valid()
    return None if checkpoint is None else (checkpoint, parse_checkpoint_id(checkpoint)[0])
