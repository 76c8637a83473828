"""Durable checkpoints as ranks and the coordinator use them, on one URL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fleet.instructions import CommitCheckpoint
from fleet.levels import peers_url
from fleet.types import Part, StateId
from storage.checkpoint import CheckpointStore, write_part
from storage.manifest import CheckpointDamaged, checkpoint_id, parse_checkpoint_id, safe_name
from storage.peer_files import PeerFiles, in_blocks

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class Parts:
    """A rank's end: writes its part, reads whole checkpoints. ``run`` as for :class:`storage.checkpoint.CheckpointStore`."""

    def __init__(self, url: str, run: str = "", **options: Any) -> None:
        self.url, self.run, self._options = url, run, options

    def write(
        self, state: StateId, generation: int, index: int, count: int, tensors: Sequence[tuple[Any, ...]], place: str = ""
    ) -> tuple[str, Part]:  # fmt: skip
        """(id of the checkpoint, the part as written). Raises OSError when the store, or a memory of ``place``, fails.

        ``tensors`` are (index, tensor), or (index, rows of it, where they begin, its shape).
        """
        from storage.layout import Piece

        checkpoint = checkpoint_id(state, generation)
        pieces = [Piece(*item) if len(item) == 4 else Piece.whole(*item) for item in tensors]
        if place:
            return checkpoint, write_part(place, checkpoint, index, count, pieces)
        return checkpoint, write_part(self.url, checkpoint, index, count, pieces, **self._options)

    def load(self, checkpoint: str) -> tuple[str, list[Tensor]]:
        """(skeleton, tensors in order), of the store or, given a URL, from memories. Raises CheckpointDamaged naming the bad part.

        What is damaged in memory is deleted there, so that nobody is sent to it again.
        """
        place, _, name = checkpoint.rpartition("/")
        store = CheckpointStore(place, run=self.run) if place else CheckpointStore(self.url, run=self.run, **self._options)
        try:
            meta, tensors = store.load(name)
        except (CheckpointDamaged, FileNotFoundError):
            if place:
                store.delete(name)
            raise
        return meta, [tensors[index] for index in range(len(tensors))]


class StepCopies:
    """Parts of the state that change in every step, in the memory of other nodes: see :class:`actors.rank.copies.CopiesPort`."""

    def put(self, series: str, state: StateId, generation: int, slot: int, data: Sequence[memoryview], to: Sequence[str]) -> None:
        """Returns once every memory of ``to`` holds it, verified. Raises OSError."""
        name = f"{checkpoint_id(state, generation)}/{slot}"
        with PeerFiles(f"{peers_url(to)}/{safe_name(series)}").writing(name) as sink:
            for number, block in enumerate(in_blocks(data)):
                sink.block(number, block)

    def get(self, series: str, state: StateId, slot: int, at: Sequence[str]) -> list[memoryview]:
        """What was put, in blocks, verified; of the newest generation where there are several. Raises OSError (FileNotFoundError)."""
        files = PeerFiles(f"{peers_url(at)}/{safe_name(series)}")
        for directory in reversed(files.directories()):
            if parse_checkpoint_id(directory)[0] == state and files.size(f"{directory}/{slot}") is not None:
                return [memoryview(block) for block in files.fetch(f"{directory}/{slot}")]
        raise FileNotFoundError(f"{series}: slot {slot} at {state} is in no memory that answers")


class RetainingStore:
    """The coordinator's end: a ``CheckpointPort`` that keeps the last ``keep`` checkpoints; in memories the last one."""

    def __init__(self, url: str, keep: int, run: str = "", **options: Any) -> None:
        self._store, self._keep, self._run = CheckpointStore(url, run=run, **options), keep, run

    def commit(self, order: CommitCheckpoint) -> int:
        """Total bytes. What is old is deleted then; a store that fails in that has the checkpoint all the same."""
        store, keep = (CheckpointStore(order.place, run=self._run, index=False), 1) if order.place else (self._store, self._keep)
        size = store.commit(order)
        try:
            store.retain(keep)
        except OSError as error:
            _log.warning("checkpoint %s is committed; older ones were not deleted, and will be after the next: %s", order.checkpoint, error)
        return size

    def newest(self) -> str | None:
        return self._store.newest()


def newest_checkpoint(url: str, run: str = "", **options: Any) -> tuple[str, StateId] | None:
    """Id and state of the newest checkpoint whose files are all sound, or None."""
    checkpoint = CheckpointStore(url, run=run, **options).newest_valid()
    return None if checkpoint is None else (checkpoint, parse_checkpoint_id(checkpoint)[0])
