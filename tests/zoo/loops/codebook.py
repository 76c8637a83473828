"""A codebook that no gradient trains: the forward moves its buffers towards what was mapped to them (VQ-VAE with moving averages).

The buffers are sums, of which the codes are quotients. So the mean over micro-batches is what the step's whole batch would leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH, CODES, DECAY = 6, 8, 0.9


class Codebook(nn.Module):
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", torch.randn(CODES, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.sums / self.counts.unsqueeze(1)
        chosen = torch.cdist(x.detach(), codes).argmin(1)
        if self.training:
            which = nn.functional.one_hot(chosen, CODES).to(x.dtype)
            self.counts.mul_(DECAY).add_(which.mean(0), alpha=1 - DECAY)
            self.sums.mul_(DECAY).add_(which.T @ x.detach() / len(x), alpha=1 - DECAY)
        found = codes[chosen]
        return x + (found - x).detach(), (x - found).square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(10, WIDTH), Codebook(), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        found, commitment = self.codebook(torch.tanh(self.encoder(x)))
        loss: Tensor = (self.decoder(found) - x).square().mean() + 0.25 * commitment
        return loss


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(14)
    model = Model().double()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=5e-3)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    found: Tensor = model(x)
    return found


LOOP = Usual(build, loss_of, rows(10, 14))
