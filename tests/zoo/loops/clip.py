"""CLIP: two towers and a temperature that is learned, and a loss that compares all pairs of the step's batch. It has a batch norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import BATCH, rows

STEPS = 24
DATA = rows(10, 43)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.left(x[:, :6])), functional.normalize(self.right(x[:, 6:]))


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(43)
    model = TwoTowers().double()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def loss_of(scale: Tensor, left: Tensor, right: Tensor) -> Tensor:
    near = scale.exp() * left @ right.T
    own = torch.arange(len(left))
    return (functional.cross_entropy(near, own) + functional.cross_entropy(near.T, own)) / 2


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer = done.objects["model"], done.objects["optimizer"]
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        lefts, rights, left_behind = [], [], []
        for batch in feed.batches(step, DATA, BATCH):
            buffers = {name: each.clone() for name, each in model.named_buffers()}
            left, right = functional_call(model, buffers, (batch,))
            lefts.append(left)
            rights.append(right)
            left_behind.append(buffers)
        loss = loss_of(model.scale, torch.cat(lefts), torch.cat(rights))
        loss.backward()
        optimizer.step()
        for name, each in model.named_buffers():
            values = [buffers[name] for buffers in left_behind]
            each.copy_(torch.stack(values).mean(0) if each.is_floating_point() else values[0])
        done.report([loss.item()])
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model = objects["model"]
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for batch in step.batches(DATA, batch_size=BATCH):
            left, right = model(batch)
            step.backward(loss_of(model.scale, step.gather(left), step.gather(right)))
        step.commit()


LOOP = Twice(build, plain, train)
