"""Whether what was asked for ahead of a reduction is here already, without asking gloo: it tells only those who wait.

Before a receive is asked for, the last eight bytes of its memory get a mark. gloo writes a message from its first byte to its last, so once
the mark is gone all of the message is here. Gradients do not look like the mark: read as a float of any width it is not a number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

MARK = 0x7FF8F1EE7A5A5A5A
WIDTH = 8
MOST = 4
"""Of more messages so many are looked at, evenly spread, which takes some microseconds; they speak for the others."""


class Landing:
    """Messages that are to come, in memory of the host. ``asked_bytes`` are all of theirs."""

    def __init__(self, messages: Sequence[torch.Tensor]) -> None:
        sizes = [message.nbytes for message in messages]
        self.asked_bytes = sum(sizes)
        self._kept = messages  # an address keeps no memory
        self._ends: list[tuple[ctypes.c_int64, int]] = []
        for number in range(0, len(sizes), -(-len(sizes) // MOST) or 1):
            if (size := sizes[number]) >= WIDTH:
                end = ctypes.c_int64.from_address(messages[number].data_ptr() + size - WIDTH)
                end.value = MARK
                self._ends.append((end, size))

    @property
    def landed_bytes(self) -> int:
        """Of those that are here as a whole by now; what is here of a part does not count."""
        here = seen = 0
        for end, size in self._ends:
            seen += size
            here += size * (end.value != MARK)
        return self.asked_bytes * here // seen if seen else 0
