"""What this process takes: memory, and bytes on their way to other ranks."""

from __future__ import annotations

import resource

import torch

EVERY_US = 10_000_000
"""A rank tells what it has used so often, in runs of few ranks."""
RANKS_A_SECOND = 20
"""And so rarely that, of many, no more do in a second."""


class Carried:
    """Bytes that were given to gloo or NCCL, or asked of them, over all groups of this process."""

    def __init__(self) -> None:
        self.total = 0

    def count(self, size: int) -> None:
        """So many more."""
        self.total += size


SENT, RECEIVED = Carried(), Carried()
FETCHED = Carried()
"""Of checkpoints, from the durable store: that is paid for where a store is."""


def every_us(world: int) -> int:
    """From one word of a rank to its next, in a run of ``world`` ranks."""
    return max(EVERY_US, world * 1_000_000 // RANKS_A_SECOND)


def used() -> tuple[int, int, int]:
    """(most memory so far on the host, most memory of the GPU, sent), in bytes. That of the GPU is what PyTorch has handed out."""
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, device, SENT.total
