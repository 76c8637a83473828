"""Loops of ranks that have the layers of a model one after the other, and the moments at which a test kills one of them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from tests.support.tensors import VOCABULARY, WIDTH, Block, Text


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens)


class Dropped(Block):
    """A block that draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Embedding(), Dropped(), Dropped(), Head())


def loss_of(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def train(run: Any) -> None:
    """Options: ``steps``, ``pause_s``; ``weighted``: by tokens; ``saves``: a file at the end."""
    torch.manual_seed(1)
    model = Model()
    weighted = "weighted" in run.options

    def loss_fn(logits: torch.Tensor, text: torch.Tensor) -> Any:
        return (loss_of(logits, text), int(text[:, 0].sum()) % 7 + 1) if weighted else loss_of(logits, text)

    pipe = run.pipeline(model.layers, loss_fn, inputs=lambda text: text[:, :-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = run.track(model=model, optimizer=optimizer)
    pause_s = float(run.options.get("pause_s", "0.01"))
    for step in run.steps(state, total=int(run.options.get("steps", "14")), clip_norm=0.5):
        pipe.step(step, Text(), batch_size=16)
        time.sleep(pause_s)
        step.commit()
    if "saves" in run.options:
        run.save(run.options["saves"])
