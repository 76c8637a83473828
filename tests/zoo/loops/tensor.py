"""Two layers that the ranks of a group divide, with a clipped gradient and a schedule. The plain loop has them whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import BATCH, STEPS, rows

DATA = rows(6, 71)


def build(options: Mapping[str, str], mesh: Any = None) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(71)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 8), nn.LayerNorm(8), nn.Linear(8, 1)).double()
    if mesh is not None:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7)}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).squeeze(1) - batch.prod(1)).square().mean()


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer, scheduler = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for batch in feed.batches(step, DATA, BATCH):
            loss = loss_of(model, batch)
            (loss / feed.shards).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        done.report(losses)
    return done


def train(run: Any) -> None:
    objects = build(run.options, run.mesh["tensor"])
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS, clip_norm=0.5):
        for batch in step.batches(DATA, batch_size=BATCH):
            step.backward(loss_of(objects["model"], batch))
        step.commit()


LOOP = Twice(build, plain, train)
