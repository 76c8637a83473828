"""Two networks against each other, each with an optimizer: steps of the one's and steps of the other's, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, Twice, averaged
from tests.zoo.usual import rows

STEPS, BATCH, WIDTH, NOISE = 24, 32, 16, 4
DATA = rows(6, 17).cumsum(1)

Objects = Mapping[str, Any]
Losses = Callable[[Objects, Tensor], Iterator[Tensor]]


def networks(seed: int) -> dict[str, Any]:
    """A generator, whose batches count in its statistics, and a discriminator."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6)).double()
    discriminator = nn.Sequential(nn.Linear(6, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(WIDTH, 1)).double()
    return {"generator": generator, "discriminator": discriminator}


def faked(objects: Objects, like: Tensor) -> Tensor:
    found: Tensor = objects["generator"](torch.randn(len(like), NOISE, dtype=torch.float64))
    return found


def in_turn(build: Callable[[Mapping[str, str]], dict[str, Any]], steps: int, judge: Losses, forge: Losses, clip: float) -> Twice:
    """So many ``steps`` of ``discriminator_optimizer``, whose losses ``judge`` gives, then one of ``generator_optimizer``, and so on.

    The gradient of the discriminator alone is clipped. A ``scheduler`` is that of the generator's optimizer.
    """

    def plain(feed: Feed) -> Done:
        done = Done(build(feed.options))
        objects, together = done.objects, nn.ModuleList([done.objects["generator"], done.objects["discriminator"]])
        for step in feed.steps(STEPS):
            judges = step % (steps + 1) < steps
            together.zero_grad()
            losses = []
            for real in averaged(together, feed.batches(step, DATA, BATCH)):
                whole = 0.0
                for loss in (judge if judges else forge)(objects, real):
                    (loss / feed.shards).backward()
                    whole += loss.item()
                losses.append(whole)
            if judges:
                nn.utils.clip_grad_norm_(objects["discriminator"].parameters(), clip)
                objects["discriminator_optimizer"].step()
            else:
                objects["generator_optimizer"].step()
                objects["scheduler"].step()
            done.report(losses)
        return done

    def train(run: Any) -> None:
        objects = build(run.options)
        judged, forged = objects["discriminator_optimizer"], objects["generator_optimizer"]
        state = run.track(**objects)
        for step in run.steps(state, total=STEPS, together=steps + 1, clip_norm={judged: clip}):
            judges = step.number % (steps + 1) < steps
            for real in step.batches(DATA, batch_size=BATCH):
                for loss in (judge if judges else forge)(objects, real):
                    step.backward(loss)
            step.commit(judged if judges else forged)

    return Twice(build, plain, train)
