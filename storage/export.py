"""A checkpoint as one plain file: what ``torch.load(FILE, weights_only=True)`` gives back, without Fleet."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.checkpoint import CheckpointStore
from storage.files import TEMPORARY
from storage.names import TensorRef, plain, read_skeleton

if TYPE_CHECKING:
    from torch import Tensor


def export_state(store: CheckpointStore, checkpoint: str, target: Path) -> tuple[int, list[str]]:
    """Write {tracked name: its state dict} to ``target``, whole or not at all.

    Returns (bytes written, classes of the objects that were left out because they are no plain data). A state whose skeleton cannot be read
    is ``{"tensors": [...]}``.

    Raises:
        CheckpointDamaged: names the part that is missing, cut short or altered.
        OSError: the store failed, or ``target`` cannot be written.
    """
    import torch

    meta, tensors = store.load(checkpoint)
    dropped: list[str] = []
    skeleton = read_skeleton(meta)
    state = {"tensors": [TensorRef(index) for index in sorted(tensors)]} if skeleton is None else plain(skeleton, dropped.append)
    beside = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            torch.save(_filled(state, tensors), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return target.stat().st_size, sorted(set(dropped))


def _filled(state: Any, tensors: dict[int, Tensor]) -> Any:
    """``state`` with tensors in their places."""
    if isinstance(state, TensorRef):
        return tensors[state.index]
    if isinstance(state, dict):
        return {key: _filled(value, tensors) for key, value in state.items()}
    return type(state)(_filled(value, tensors) for value in state) if type(state) in (list, tuple) else state
