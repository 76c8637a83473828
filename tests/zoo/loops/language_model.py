"""A small transformer: gradients are accumulated and clipped, embeddings are tied, the learning rate is set by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice

STEPS, BATCH, WIDTH, HEADS, LENGTH, WORDS = 24, 32, 16, 2, 12, 40
CLIP_NORM = 0.5


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Of a text; what comes next follows from the two words before."""

    def __init__(self) -> None:
        words = [1, 2]
        while len(words) < 600:
            words.append((3 * words[-1] + 5 * words[-2] + 1) % WORDS)
        self._words = torch.tensor(words)

    def __len__(self) -> int:
        return len(self._words) - LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._words[index : index + LENGTH], self._words[index + 1 : index + LENGTH + 1]


TEXT = Windows()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = self.mixed(self.norms[0](x)).view(count, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.drop(self.out(found.transpose(1, 2).reshape(count, length, WIDTH)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(2)
    model = Transformer().double()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)}


def rate(step: int) -> float:
    return 1e-2 * min((step + 1) / 6, (1 + math.cos(math.pi * step / STEPS)) / 2)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer = done.objects.values()
    for step in feed.steps(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        losses = []
        for x, y in feed.batches(step, TEXT, BATCH):
            loss = loss_of(model, x, y)
            (loss / feed.shards).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        done.report(losses)
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model, optimizer = objects.values()
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS, clip_norm=CLIP_NORM):
        for group in optimizer.param_groups:
            group["lr"] = rate(step.number)
        for x, y in step.batches(TEXT, batch_size=BATCH):
            step.backward(loss_of(model, x, y))
        step.commit()


LOOP = Twice(build, plain, train)
