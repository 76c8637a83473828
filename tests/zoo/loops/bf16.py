"""Forwards in bfloat16, by autocast, of a model in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH = 24


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(9)
    model = nn.Sequential(
        nn.Linear(6, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
    )
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=5e-3)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(x)
    return (found.float().squeeze(1) - x.sum(1)).square().mean()


LOOP = Usual(build, loss_of, rows(6, 9, torch.float32), pairs=True)
