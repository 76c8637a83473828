"""Blocks with dropout whose activations are computed again in the backward, in both of PyTorch's ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.usual import Usual, rows

WIDTH = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=number % 2 == 0)
        found: Tensor = self.last(x)
        return found.squeeze(1)


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(11)
    model = Model().double()
    return {"model": model, "optimizer": torch.optim.NAdam(model.parameters(), lr=5e-3)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return (model(x) - x.sum(1)).square().mean()


LOOP = Usual(build, loss_of, rows(6, 11))
