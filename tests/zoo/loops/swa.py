"""Stochastic weight averaging by PyTorch's own classes: weights of the second half, at a constant rate, are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import BATCH, rows

STEPS, BEGINS = 24, 10
DATA = rows(6, 68)


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(68)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    rate = SWALR(optimizer, swa_lr=1e-2, anneal_epochs=BEGINS)
    return {"model": model, "optimizer": optimizer, "scheduler": rate, "average": AveragedModel(model)}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(1) - x.sin().sum(1)).square().mean()


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer, rate, average = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for batch in feed.batches(step, DATA, BATCH):
            loss = loss_of(model, batch)
            (loss / feed.shards).backward()
            losses.append(loss.item())
        optimizer.step()
        rate.step()
        if step >= BEGINS:
            average.update_parameters(model)
        done.report(losses)
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model, _, _, average = objects.values()
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for batch in step.batches(DATA, batch_size=BATCH):
            step.backward(loss_of(model, batch))
        if step.number >= BEGINS:
            step.on_commit(lambda: average.update_parameters(model))
        step.commit()


LOOP = Twice(build, plain, train)
