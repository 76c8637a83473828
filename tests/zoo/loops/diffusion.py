"""Denoising diffusion: each sample is given its own time and noise, and the model says the noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

TIMES = 50
KEPT = torch.linspace(1 - 1e-4, 1 - 2e-2, TIMES, dtype=torch.float64).cumprod(0)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, 16)
        self.first, self.last = nn.Linear(6, 16), nn.Sequential(nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 6))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.last(self.first(x) + self.time(time))


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(63)
    model = Denoiser().double()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=2e-3)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    time, noise = torch.randint(TIMES, (len(x),)), torch.randn_like(x)
    kept = KEPT[time].unsqueeze(1)
    return (model(kept.sqrt() * x + (1 - kept).sqrt() * noise, time) - noise).square().mean()


LOOP = Usual(build, loss_of, rows(6, 63))
