"""Three heads on one trunk, each with a backward of its own. The labels of one are there for some samples only, so that some micro-batches
do without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice

STEPS, BATCH, WIDTH = 24, 32, 12
Batch = tuple[Tensor, Tensor, Tensor]


def samples() -> torch.utils.data.TensorDataset:
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    labelled = torch.arange(200) % 4 == 0
    return torch.utils.data.TensorDataset(x, (x[:, 0] > x[:, 1]).long(), labelled)


DATA = samples()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Dropout(0.1))
        self.side, self.sum, self.product = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(6)
    model = Model().double()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=5e-3)}


def losses_of(model: Any, batch: Batch) -> Iterator[Tensor]:
    """One after the other, each with a forward of its own."""
    x, side, labelled = batch
    yield nn.functional.cross_entropy(model.side(model.trunk(x)), side)
    yield (model.sum(model.trunk(x)).squeeze(1) - x.sum(1)).square().mean()
    if labelled.any():
        found = model.product(model.trunk(x[labelled])).squeeze(1)
        yield 0.5 * (found - x[labelled].prod(1)).square().sum() / len(x)


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for batch in feed.batches(step, DATA, BATCH):
            together = 0.0
            for loss in losses_of(model, batch):
                (loss / feed.shards).backward()
                together += loss.item()
            losses.append(together)
        optimizer.step()
        done.report(losses)
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model = objects["model"]
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for batch in step.batches(DATA, batch_size=BATCH):
            for loss in losses_of(model, batch):
                step.backward(loss)
        step.commit()


LOOP = Twice(build, plain, train)
