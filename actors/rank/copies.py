"""Redundant copies of what one rank alone holds, step after step, in the memory of other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from fleet.types import StateId


class CopiesPort(Protocol):
    """Other nodes' memories, each ``host:port``; ``storage.parts.StepCopies`` implements it.

    Of a series the last two states stay: k is there until the first writer comes with k + 2. A writer of an older lineage or generation
    than the last one is refused.
    """

    def put(self, series: str, state: StateId, generation: int, slot: int, data: Sequence[memoryview], to: Sequence[str]) -> None:
        """Returns once every memory of ``to`` holds it, verified. Raises OSError."""
        ...

    def get(self, series: str, state: StateId, slot: int, at: Sequence[str]) -> list[memoryview]:
        """What was put, in blocks, verified. Raises OSError; FileNotFoundError when no memory that answers holds it."""
        ...


class Copies:
    """One rank's copies of one ``series``, sent by a thread of their own beside the steps."""

    def __init__(self, port: CopiesPort, series: str) -> None:
        self._port, self._series = port, series
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-copies")

    def put(self, state: StateId, generation: int, slot: int, tensors: Sequence[torch.Tensor], to: Sequence[str]) -> Future[None]:
        """Send ``tensors``, which must not change until the future is done: all of ``to`` hold them then, or it has an OSError."""
        return self._thread.submit(self._port.put, self._series, state, generation, slot, [_view(tensor) for tensor in tensors], to)

    def get(self, state: StateId, slot: int, at: Sequence[str]) -> torch.Tensor:
        """The bytes of the tensors that ``slot`` put at ``state``, one after the other: flat uint8. Raises OSError."""
        blocks = self._port.get(self._series, state, slot, at)
        parts = [torch.frombuffer(block, dtype=torch.uint8) for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Wait for what is under way."""
        self._thread.shutdown()


def _view(tensor: torch.Tensor) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("copies are sent from contiguous tensors in host memory")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()).cast("B")
