"""Skeletons as earlier versions wrote them: pickled, in base 64, with a number in place of each tensor."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj.detach())
        return len(self.tensors) - 1


def pickled(**tracked: Any) -> tuple[str, list[torch.Tensor]]:
    """(skeleton, tensors) of objects that have ``state_dict``; a tensor that occurs twice is listed twice."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump({name: each.state_dict() for name, each in tracked.items()})
    return base64.b64encode(file.getvalue()).decode(), pickler.tensors
