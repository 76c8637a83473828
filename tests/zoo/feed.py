"""What plain loops have beside PyTorch: Fleet's samples, in its micro-batches, with its random numbers; and what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from actors.rank.data.sampling import samples_of, seed_data, seed_shard, seed_step

SEED = 0


@dataclass
class Done:
    """What a loop has come to.

    Attributes:
        objects: what is trained, under the names that the loop on Fleet tracks it by.
        losses: of each step, the mean over its micro-batches.
        figures: of evaluations, by name, by number of steps that were taken.
        logged: the same of what micro-batches say of themselves: the mean over those of a step.
    """

    objects: Mapping[str, Any]
    losses: list[float] = field(default_factory=list)
    figures: dict[str, dict[int, float]] = field(default_factory=dict)
    logged: dict[str, dict[int, float]] = field(default_factory=dict)

    def report(self, losses: Sequence[float]) -> None:
        """Losses of a step's micro-batches, of equal weight."""
        self.losses.append(math.fsum(losses) / len(losses))

    def judged(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.figures.setdefault(name, {})[step] = value

    def log(self, step: int, name: str, values: Sequence[float]) -> None:
        self.logged.setdefault(name, {})[step] = math.fsum(values) / len(values)


@dataclass(frozen=True)
class Twice:
    """A loop in plain PyTorch and on Fleet; ``build``: with ``run.options``, what both train."""

    build: Callable[[Mapping[str, str]], dict[str, Any]]
    plain: Callable[[Feed], Done]
    train: Callable[[Any], None]


class Feed:
    """``for step in feed.steps(STEPS): for batch in feed.batches(step, data, 32): ...``.

    Args:
        shards: into how many micro-batches a step's batch is cut.
        options: as ``run.options``.
        order: the number of the batch of the data's own order that each step takes; that of the step.
    """

    def __init__(
        self, shards: int, options: Mapping[str, str] | None = None, order: Callable[[int], int] = lambda step: step
    ) -> None:  # fmt: skip
        self.shards, self.options, self._order = shards, options or {}, order

    def steps(self, total: int) -> Iterator[int]:
        for step in range(total):
            seed_step(SEED, step)
            yield step

    def batches(self, step: int, data: Any, batch_size: int, collate: Callable[[list[Any]], Any] = default_collate) -> Iterator[Any]:
        for shard in range(self.shards):
            seed_data(SEED, step, shard)
            batch = collate(samples_of(data, SEED, self._order(step), shard, self.shards, batch_size))
            seed_shard(SEED, step, shard)
            yield batch


def averaged(model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """``batches``, each of which finds the buffers of ``model`` as the step has found them; what the step leaves is the mean of what all
    have left. Of one batch, and of integers, it is what the first has left."""
    buffers = list(model.buffers())
    before = [each.clone() for each in buffers]
    left: list[list[Tensor]] = []
    for batch in batches:
        for each, value in zip(buffers, before, strict=True):
            each.copy_(value)
        yield batch
        left.append([each.clone() for each in buffers])
    for each, values in zip(buffers, zip(*left, strict=True), strict=True):
        each.copy_(torch.stack(values).mean(0) if each.is_floating_point() else values[0])


def in_pairs(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of neighbours, then of neighbouring sums, and so on: 2, 4, 8 or 16 of them."""
    while len(gradients) > 1:
        gradients = [left + right for left, right in zip(gradients[::2], gradients[1::2], strict=True)]
    return gradients[0]
