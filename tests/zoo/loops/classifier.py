"""A classifier with batch norm and dropout, a scheduler that is stepped with each step, and an accuracy over the whole held-out set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice, averaged

STEPS, BATCH, CLASSES = 24, 64, 3


def points(count: int, seed: int) -> torch.utils.data.TensorDataset:
    x = torch.randn(count, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.view(count, CLASSES, -1).sum(2).argmax(1))


TRAINED, HELD_OUT = points(400, 1), points(150, 2)


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, CLASSES)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1)}


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, y, label_smoothing=0.1)


def accuracy(scores: Tensor, y: Tensor) -> float:
    return float((scores.argmax(1) == y).double().mean())


def judged(model: nn.Module) -> dict[str, float]:
    model.eval()
    x, y = HELD_OUT.tensors
    with torch.no_grad():
        scores = model(x)
    return {"val_accuracy": accuracy(scores, y), "val_loss": float(loss_of(scores, y))}


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer, scheduler = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses, right = [], []
        for x, y in averaged(model, feed.batches(step, TRAINED, BATCH)):
            scores = model(x)
            loss = loss_of(scores, y)
            (loss / feed.shards).backward()
            losses.append(loss.item())
            right.append(accuracy(scores, y))
        optimizer.step()
        scheduler.step()
        done.report(losses)
        for name in ("accuracy", "own_accuracy"):
            done.log(step + 1, name, right)
        if (step + 1) % 6 == 0:
            done.judged(step + 1, judged(model))
            model.train()
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model = objects["model"]
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        right = seen = 0.0
        for x, y in step.batches(TRAINED, batch_size=BATCH):
            scores = model(x)
            step.log(accuracy=accuracy(scores, y))
            step.backward(loss_of(scores, y))
            right, seen = right + accuracy(scores, y), seen + 1
        step.log(own_accuracy=right / max(seen, 1))
        step.commit()
        run.evaluate(lambda: judged(model), every=6)


LOOP = Twice(build, plain, train)
