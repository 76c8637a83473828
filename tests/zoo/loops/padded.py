"""Sequences of unequal length, padded to the longest of their micro-batch. Losses are means over tokens; some micro-batches have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice

STEPS, BATCH, WORDS, PADDING = 24, 32, 20, 0
Pair = tuple[Tensor, Tensor]


class Lines(torch.utils.data.Dataset[Tensor]):
    """Every third one is empty."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Tensor:
        length = index * 7 % 13 if index % 3 else 0
        return 1 + torch.arange(index, index + length) ** 2 % (WORDS - 1)


TEXT = Lines()


def padded(lines: list[Tensor]) -> Pair:
    found = nn.utils.rnn.pad_sequence([nn.functional.pad(line, (1, 1), value=PADDING) for line in lines], True, PADDING)
    return found[:, :-1], found[:, 1:]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixer, self.head = nn.Embedding(WORDS, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.mixer(self.words(x))[0])
        return found


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Reader().double()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=5e-3)}


def tokens(batch: Pair) -> int:
    return int((batch[1] != PADDING).sum())


def loss_of(model: nn.Module, batch: Pair) -> Tensor:
    """The mean over tokens: not a number where there are none."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=PADDING)


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        together = sum(map(tokens, feed.batches(step, TEXT, BATCH, padded)))
        losses = []
        for batch in feed.batches(step, TEXT, BATCH, padded):
            share = tokens(batch) / together
            if share:
                loss = loss_of(model, batch) * share
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        done.losses.append(sum(losses))
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model = objects["model"]
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for batch in step.batches(TEXT, batch_size=BATCH, collate_fn=padded):
            step.backward(loss_of(model, batch), weight=tokens(batch))
        step.commit()


LOOP = Twice(build, plain, train)
