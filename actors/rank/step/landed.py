"""Whether messages that a rank asked for before a reduction are here. gloo itself tells this only to a rank that waits.

Before each receive the rank writes a mark into the last eight bytes of the memory. The library gloo writes a message from its first byte to
its last. So once the mark is gone, all of the message is here. No gradient looks like the mark: as a float of any width it is not a number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

MARK = 0x7FF8F1EE7A5A5A5A
WIDTH = 8
MOST = 4
"""Of many messages the rank examines so many, evenly spread, in some microseconds. They stand for the others."""


class Landing:
    """Expected messages, in memory of the host. ``asked_bytes``: their size together."""

    def __init__(self, messages: Sequence[torch.Tensor]) -> None:
        sizes = [message.nbytes for message in messages]
        self.asked_bytes = sum(sizes)
        self._kept = messages  # keeps the memory, which the addresses below do not
        self._ends: list[tuple[ctypes.c_int64, int]] = []
        for number in range(0, len(sizes), -(-len(sizes) // MOST) or 1):
            if (size := sizes[number]) >= WIDTH:
                end = ctypes.c_int64.from_address(messages[number].data_ptr() + size - WIDTH)
                end.value = MARK
                self._ends.append((end, size))

    @property
    def landed_bytes(self) -> int:
        """Bytes of the messages that are here completely; a part of a message does not count."""
        here = seen = 0
        for end, size in self._ends:
            seen += size
            here += size * (end.value != MARK)
        return self.asked_bytes * here // seen if seen else 0
