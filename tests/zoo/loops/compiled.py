"""``torch.compile`` around a model. The tracked model is the compiled one, as in most scripts. The option ``backend`` says by what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH = 16


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(12)
    torch.compiler.reset()
    layers = [nn.Linear(6, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)]
    model: Any = torch.compile(nn.Sequential(*layers).double(), backend=options.get("backend", "aot_eager"))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=5e-3)}


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    return (model(x).squeeze(1) - x.sum(1)).square().mean()


LOOP = Usual(build, loss_of, rows(6, 12))
