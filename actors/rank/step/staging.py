"""Memory in which a peer's partial sums lie from their arrival until they are added up."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LINE_BYTES = 64


class Staging:
    """The memory of one rank, kept for the run. It is cut into slots, one for each bucket in flight, and a slot into buffers of equal size.

    Messages of a group that is gone may still come, so the next group gets other memory.
    """

    def __init__(self) -> None:
        self._stages: dict[torch.device, torch.Tensor] = {}
        self._stages_before: dict[torch.device, torch.Tensor] = {}
        self._buffer_bytes = 0

    def begin_group(self) -> None:
        """Another group uses the memory from now on."""
        self._stages, self._stages_before = self._stages_before, self._stages

    def fit(self, sizes_bytes: Iterable[int]) -> None:
        """Give each buffer room for any of these sizes from now on: in whole cache lines, at least one."""
        self._buffer_bytes = max(1, -(-max(sizes_bytes, default=0) // LINE_BYTES)) * LINE_BYTES

    def buffers(self, device: torch.device, slot: int, slots: int, count: int) -> list[torch.Tensor]:
        """The ``count`` buffers of one of the ``slots``, as bytes."""
        size = self._buffer_bytes
        needed = slots * count * size
        stage = self._stages.get(device)
        if stage is None or stage.numel() < needed:
            room_for_losses = 2 * needed  # after a loss the sums are finer, and there are more of them
            stage = self._stages[device] = torch.empty(room_for_losses, dtype=torch.uint8, device=device)
        return [stage[start : start + size] for start in range(slot * count * size, (slot + 1) * count * size, size)]
