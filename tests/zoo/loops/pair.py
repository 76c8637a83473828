"""A body and a head, each with an optimizer, a scheduler and a clipping of its own; both take each step together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import BATCH, STEPS, rows

DATA = rows(6, 20)
BODY, HEAD = 0.5, 0.2


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(20)
    body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Tanh()).double()
    head = nn.Linear(16, 1).double()
    of_body = torch.optim.Adam(body.parameters(), lr=5e-3)
    of_head = torch.optim.SGD(head.parameters(), lr=5e-2, momentum=0.9)
    return {
        "body": body,
        "head": head,
        "of_body": of_body,
        "of_head": of_head,
        "warmup": torch.optim.lr_scheduler.LinearLR(of_body, 0.2, total_iters=10),
        "decay": torch.optim.lr_scheduler.ExponentialLR(of_head, 0.95),
    }


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    body, head, of_body, of_head, *schedulers = done.objects.values()
    for step in feed.steps(STEPS):
        of_body.zero_grad()
        of_head.zero_grad()
        losses = []
        for x in feed.batches(step, DATA, BATCH):
            loss = (head(body(x)).squeeze(1) - x.sin().sum(1)).square().mean()
            (loss / feed.shards).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(body.parameters(), BODY)
        nn.utils.clip_grad_norm_(head.parameters(), HEAD)
        for each in (of_body, of_head, *schedulers):
            each.step()
        done.report(losses)
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    body, head, of_body, of_head, *_ = objects.values()
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS, clip_norm={of_body: BODY, of_head: HEAD}):
        for x in step.batches(DATA, batch_size=BATCH):
            step.backward((head(body(x)).squeeze(1) - x.sin().sum(1)).square().mean())
        step.commit()


LOOP = Twice(build, plain, train)
