"""Three models whose FLOPs are known from formulas, and what Fleet counts of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from actors.rank.step.flops import FlopCount
from examples import gpt

BATCH = 8
FORWARD_AND_BACKWARD = 3
"""Backward takes twice what forward takes, but for the first layer, whose input needs no gradient."""


def counted(work: Callable[[], object], steps: int = 2) -> float:
    """FLOPs of one step of one shard."""
    count = FlopCount()
    for _ in range(steps):
        count.step_begins()
        with count.shard():
            work()
        count.shard_ends()
    return count.of_step(1)


def perceptron() -> tuple[Callable[[], Tensor], list[nn.Parameter], float]:
    model, x, y = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(BATCH, 64), torch.arange(BATCH)
    first, second = 2 * BATCH * 64 * 256, 2 * BATCH * 256 * 10
    return lambda: nn.functional.cross_entropy(model(x), y), [*model.parameters()], 2 * first + FORWARD_AND_BACKWARD * second


def convolutions() -> tuple[Callable[[], Tensor], list[nn.Parameter], float]:
    model, x = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1)), torch.randn(BATCH, 1, 12, 12)
    first, second = 2 * BATCH * 12 * 12 * 9 * 8, 2 * BATCH * 12 * 12 * 9 * 8 * 16
    return lambda: model(x).square().mean(), [*model.parameters()], 2 * first + FORWARD_AND_BACKWARD * second


def transformer() -> tuple[Callable[[], Tensor], list[nn.Parameter], float]:
    """Of the linear layers 2 a weight and token; of attention 4 a token, place and number of its width."""
    model, batch = gpt.GPT(), torch.randint(256, (BATCH, gpt.CONTEXT + 1))
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    tokens = BATCH * gpt.CONTEXT
    forward = 2 * weights * tokens + 4 * gpt.LAYERS * tokens * gpt.CONTEXT * gpt.WIDTH
    return lambda: gpt.loss_fn(model, batch), [*model.parameters()], FORWARD_AND_BACKWARD * forward


MODELS = [perceptron, convolutions, transformer]
