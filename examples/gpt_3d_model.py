"""gpt_tensor.py's model as a list of layers, so that it can be cut into stages."""

from __future__ import annotations

import torch
from gpt import CONTEXT, HEADS, LAYERS, WIDTH
from gpt_tensor_model import PLAN, Block
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.place.weight


def build(mesh: DeviceMesh, width: int = WIDTH, layers: int = LAYERS) -> nn.Sequential:
    blocks = [Block(width, HEADS) for _ in range(layers)]
    for block in blocks:
        parallelize_module(block, mesh, PLAN)
    return nn.Sequential(Embedding(width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def loss_fn(logits: Tensor, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
