"""Forwards in float16 with a ``GradScaler`` that begins far too high and grows soon: some steps overflow, and are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH = 24


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=5e-3), "scaler": scaler}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        found = model(x)
    return (found.float().squeeze(1) - x.sum(1)).square().mean()


LOOP = Usual(build, loss_of, rows(6, 10, torch.float32), pairs=True)
