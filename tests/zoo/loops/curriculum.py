"""Easy samples first, and longer ones later: the data set follows from the number of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import BATCH, rows

STEPS, WIDTH = 24, 16
STAGES = (rows(3, 65), rows(6, 66), rows(9, 67))
"""Sequences of three lengths. A new stage begins each eight steps."""


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(65)
    model = nn.ModuleDict({"cells": nn.LSTM(1, WIDTH, batch_first=True), "head": nn.Linear(WIDTH, 1)}).double()
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=5e-3)}


def loss_of(model: Any, x: Tensor) -> Tensor:
    out, _ = model["cells"](x.unsqueeze(2))
    return (model["head"](out[:, -1]).squeeze(1) - x.sum(1)).square().mean()


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for batch in feed.batches(step, STAGES[step // 8], BATCH):
            loss = loss_of(model, batch)
            (loss / feed.shards).backward()
            losses.append(loss.item())
        optimizer.step()
        done.report(losses)
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for batch in step.batches(STAGES[step.number // 8], batch_size=BATCH):
            step.backward(loss_of(objects["model"], batch))
        step.commit()


LOOP = Twice(build, plain, train)
