"""Groups of parameters with rates, moments and decay of their own, and a scheduler that knows a curve for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH = 16


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(13)
    body = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(body, nn.Linear(WIDTH, 1)).double()
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in body.parameters() if each.ndim > 1], "lr": 2e-3, "weight_decay": 0.1},
            {"params": [each for each in body.parameters() if each.ndim < 2], "lr": 2e-3, "weight_decay": 0.0},
            {"params": list(model[1].parameters()), "lr": 1e-2, "betas": (0.8, 0.9), "amsgrad": True},
        ]
    )
    curves = [lambda step: 1 / (1 + step), lambda step: 1.0, lambda step: min(1.0, (step + 1) / 10)]
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, curves)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return (model(x).squeeze(1) - x.sin().sum(1)).square().mean()


LOOP = Usual(build, loss_of, rows(6, 13))
