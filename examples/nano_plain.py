"""A common training script in plain PyTorch, for one process. docs/nano.md shows its port.

Each step adds up gradients of several micro-batches. The script sets its learning rate by hand, uses mixed precision, and validates now and
then to keep the best model.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT, WIDTH, LAYERS, HEADS = 32, 64, 2, 4
BATCH, MICRO_BATCHES = 8, 8
PEAK_RATE, LAST_RATE, WARMUP = 4e-3, 4e-4, 10
EVERY, EVAL_BATCHES = 10, 4


def load(held_out: bool) -> Tensor:
    """Tokens of one split in a row: bytes of the interpreter's own standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for i, path in enumerate(files) if (i % 10 == 0) == held_out)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, bias=False)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norms[0](x)
        x = x + self.attend(seen, seen, seen, attn_mask=self.future, need_weights=False)[0]
        return x + self.think(self.norms[1](x))


class Nano(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.body = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = self.head(self.body(0.1 * self.tokens(x) + self.places))
            return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def build() -> tuple[Nano, torch.optim.Optimizer]:
    model = Nano()
    decayed = [tensor for tensor in model.parameters() if tensor.ndim > 1]
    others = [tensor for tensor in model.parameters() if tensor.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))


def get_batch(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of ``BATCH`` random places."""
    starts = torch.randint(len(tokens) - CONTEXT, (BATCH,)).tolist()
    rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def rate(number: int, steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    if number < WARMUP:
        return PEAK_RATE * (number + 1) / WARMUP
    done = (number - WARMUP) / max(1, steps - WARMUP)
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def mean_losses(model: Nano, splits: dict[str, Tensor]) -> dict[str, float]:
    """The mean loss of some random batches of each split."""
    model.eval()
    found = {name: sum(model(*get_batch(tokens)).item() for _ in range(EVAL_BATCHES)) / EVAL_BATCHES for name, tokens in splits.items()}
    model.train()
    return found


def train(steps: int) -> None:
    splits = {"train_loss": load(held_out=False), "val_loss": load(held_out=True)}
    model, optimizer = build()
    best = math.inf
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(number, steps)
        for _ in range(MICRO_BATCHES):
            x, y = get_batch(splits["train_loss"])
            loss = model(x, y) / MICRO_BATCHES
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (number + 1) % EVERY == 0:
            losses = mean_losses(model, splits)
            print(number + 1, losses, flush=True)
            if losses["val_loss"] < best:
                best = losses["val_loss"]
                torch.save(model.state_dict(), "best.pt")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
