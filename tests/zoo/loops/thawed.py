"""A head is trained first; then layers thaw one after the other, from the last to the first, and the head freezes at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import STEPS, Usual, rows

WIDTH = 12
TRAINED = {"0": range(16, STEPS), "2": range(9, STEPS), "4": range(3, STEPS), "6": range(20)}
"""By layer, the steps in which it is trained."""


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(4)
    layers = [nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers).double()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)}


def thaw(model: nn.Module, step: int) -> None:
    for name, steps in TRAINED.items():
        model.get_submodule(name).requires_grad_(step in steps)


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return (model(x).squeeze(1) - x.sin().sum(1)).square().mean()


LOOP = Usual(build, loss_of, rows(6, 4), begin=thaw)
