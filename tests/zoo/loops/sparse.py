"""Embeddings with sparse gradients. Ranks sum them as dense ones, so the plain loop makes them dense, too, before its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import BATCH

STEPS, WORDS = 24, 60
DATA = torch.randint(WORDS, (200, 5), generator=torch.Generator().manual_seed(69))


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(69)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 8, sparse=True), nn.Linear(8, 1)).double()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)}


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return (model(words).squeeze(1) - words.double().mean(1) / WORDS).square().mean()


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for words in feed.batches(step, DATA, BATCH):
            loss = loss_of(model, words)
            (loss / feed.shards).backward()
            losses.append(loss.item())
        for each in model.parameters():
            each.grad = each.grad.to_dense()
        optimizer.step()
        done.report(losses)
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for words in step.batches(DATA, batch_size=BATCH):
            step.backward(loss_of(objects["model"], words))
        step.commit()


LOOP = Twice(build, plain, train)
