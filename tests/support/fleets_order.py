"""The order of samples that a run of Fleet has, for trainers of others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from actors.rank.data.sampling import sample_indices
from tests.zoo.feed import SEED


class InFleetsOrder(torch.utils.data.Sampler[int]):
    """Samples as a run of Fleet has them, in epochs of whole steps."""

    def __init__(self, samples: int, batch: int) -> None:
        self.samples, self.batch, self.epoch = samples, batch, 0

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        """Trainers say which epoch begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        steps = self.samples // self.batch
        for step in range(self.epoch * steps, (self.epoch + 1) * steps):
            yield from sample_indices(SEED, step, 0, 1, self.batch, self.samples)
        self.epoch += 1
