"""How long a rank's shards take on its accelerator, by events on the stream that are read once the step's reduction has ended."""

from __future__ import annotations

import torch


class Stopwatch:
    """Pairs of CUDA events, one for each shard of a step, made once and used again. On a CPU it does nothing: there the clock is enough.

    Kernels run later than the loop: the loop's clock shows when it asked for a shard's kernels, not how long they took.
    """

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._used = 0

    def begin(self) -> None:
        """A shard begins."""
        if not self._on:
            return
        if self._used == len(self._pairs):
            self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._pairs[self._used][0].record()

    def end(self) -> None:
        """The loop is done with the shard; its kernels may still run."""
        if self._on:
            self._pairs[self._used][1].record()
            self._used += 1

    def forget(self) -> None:
        """Drop the times of all shards so far."""
        self._used = 0

    def take_us(self) -> int:
        """Microseconds of all shards since the last call, 0 on a CPU. After a reduction it does not wait, as that needed their
        gradients."""
        pairs, self._used = self._pairs[: self._used], 0
        for _, end in pairs:
            end.synchronize()
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in pairs)
        return round(1000 * milliseconds)
