"""A byte-level GPT learns Python from the standard library of the interpreter that runs it: no download, no tokenizer."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import fleet

CONTEXT, WIDTH, LAYERS, HEADS, DROPOUT = 48, 192, 4, 4, 0.1


class Source(torch.utils.data.Dataset[Tensor]):
    """Item ``i`` is the ``CONTEXT + 1`` bytes from offset ``i`` on. Every twentieth file is held out for validation."""

    def __init__(self, held_out: bool = False) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.relative_to(root).parts))
        text = bytearray().join(path.read_bytes() for i, path in enumerate(files) if (i % 20 == 0) == held_out)
        self.bytes = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.bytes) - CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index : index + CONTEXT + 1].long()


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.before, self.after, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(DROPOUT)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.after(x)))


class GPT(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)), nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.token(x) + self.place.weight)


def build(steps: int) -> tuple[GPT, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / (1 + steps // 10), 1 - n / steps))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, data: Source, samples: int = 256) -> dict[str, float]:
    batch = torch.stack([data[i] for i in range(0, len(data), len(data) // samples)])
    return {"val_loss": loss_fn(model.eval(), batch).item()}  # nats per byte


def train(run: fleet.Run) -> None:
    data, held_out, steps = Source(), Source(held_out=True), int(run.options.get("steps", "200"))
    model, optimizer, scheduler = build(steps)
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(state, total=steps, clip_norm=1.0):
        for batch in step.batches(data, batch_size=64, tokens=CONTEXT):
            step.backward(loss_fn(model.train(), batch))
        step.commit()
        run.evaluate(lambda: validate(model, held_out), every=50)
