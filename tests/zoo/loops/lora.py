"""LoRA: a model that was trained before is frozen, and small matrices beside its layers are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH, RANK = 16, 3


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base.requires_grad_(False), nn.Dropout(0.1)
        self.down, self.up = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + 2.0 * self.up(self.down(self.drop(x)))
        return found


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(8)
    layers = [nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(Adapted(layers[0]), nn.GELU(), Adapted(layers[1]), nn.GELU(), layers[2].requires_grad_(False)).double()
    trained = [each for each in model.parameters() if each.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=1e-2)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return (model(x).squeeze(1) - x.sin().sum(1)).square().mean()


LOOP = Usual(build, loss_of, rows(6, 8))
