"""SimCLR: two views of each sample, and a loss that compares all samples of the step's batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import BATCH, rows

STEPS = 24
DATA = rows(6, 41)


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(41)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 8)).double()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}


def views(model: nn.Module, x: Tensor) -> Tensor:
    """Two views of each sample, by noise: shape (samples, 2, 8)."""
    pair = torch.stack([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)], dim=1)
    return functional.normalize(model(pair), dim=2)


def nt_xent(z: Tensor) -> Tensor:
    """Of views of all samples: each one's other view is to be told from all else."""
    flat = torch.cat([z[:, 0], z[:, 1]])
    near = flat @ flat.T / 0.5
    near = near.masked_fill(torch.eye(len(flat), dtype=torch.bool), -torch.inf)
    other = torch.arange(len(flat)).roll(len(z))
    return functional.cross_entropy(near, other)


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer = done.objects["model"], done.objects["optimizer"]
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        loss = nt_xent(torch.cat([views(model, batch) for batch in feed.batches(step, DATA, BATCH)]))
        loss.backward()
        optimizer.step()
        done.report([loss.item()])
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model = objects["model"]
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for batch in step.batches(DATA, batch_size=BATCH):
            step.backward(nt_xent(step.gather(views(model, batch))))
        step.commit()


LOOP = Twice(build, plain, train)
