"""Two heads in turn, one in each step, and layers that some micro-batches leave out, by chance: no step uses all parameters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(6, WIDTH), nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            if random.random() < 0.1:
                x = x + torch.tanh(layer(x))
        found: Tensor = self.heads[head](x)
        return found.squeeze(1)


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Model().double()
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=0.01)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return (model(x, step % 2) - (x.sum(1), x.prod(1))[step % 2]).square().mean()


LOOP = Usual(build, loss_of, rows(6, 5))
