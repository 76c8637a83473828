"""The resources of this process: memory, and bytes sent to other ranks."""

from __future__ import annotations

import resource

import torch

EVERY_US = 10_000_000
"""In runs of few ranks, each rank reports its usage at this interval."""
RANKS_A_SECOND = 20
"""In runs of many ranks, at most so many report in a second."""


class Carried:
    """Bytes sent or received by gloo and NCCL, over all groups of this process."""

    def __init__(self) -> None:
        self.total = 0

    def count(self, size: int) -> None:
        """Add ``size`` bytes."""
        self.total += size


SENT, RECEIVED = Carried(), Carried()
FETCHED = Carried()
"""Bytes of checkpoints from the durable store, which some stores charge for."""


def every_us(world: int) -> int:
    """The interval between two reports of a rank, in a run of ``world`` ranks."""
    return max(EVERY_US, world * 1_000_000 // RANKS_A_SECOND)


def used() -> tuple[int, int, int]:
    """(peak host memory, peak GPU memory, sent), in bytes. The GPU's peak is that of PyTorch's allocations."""
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, device, SENT.total
