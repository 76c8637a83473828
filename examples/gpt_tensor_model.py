"""gpt.py's model for PyTorch's tensor parallelism: queries, keys and values are modules of their own, so that ranks divide the heads."""

from __future__ import annotations

import torch
from gpt import CONTEXT, HEADS, LAYERS, WIDTH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after, self.width = nn.LayerNorm(width), nn.LayerNorm(width), width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.token(x) + self.place.weight)


PLAN = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{name: RowwiseParallel() for name in ("out", "down")},
}
"""How the ranks of a tensor group divide a block: heads, and the middle of the MLP."""


def build(mesh: DeviceMesh, width: int = WIDTH, layers: int = LAYERS) -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(width, layers)
    for block in (each for each in model.blocks if isinstance(each, Block)):
        parallelize_module(block, mesh, PLAN)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
