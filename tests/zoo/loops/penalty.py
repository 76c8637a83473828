"""A loss with the gradient of a gradient: the slope of the model at its samples is penalized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1)).double()
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=5e-3)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    x = x.clone().requires_grad_()
    found = model(x).squeeze(1)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return (found - x.detach().sin().sum(1)).square().mean() + 0.1 * slope.square().sum(1).mean()


LOOP = Usual(build, loss_of, rows(6, 19))
