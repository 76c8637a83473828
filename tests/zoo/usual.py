"""A loop twice, in plain PyTorch and on Fleet, for models of which the model is what is special, and not the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.feed import Done, Feed, averaged, in_pairs

STEPS, BATCH = 24, 32


def rows(width: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """200 samples."""
    return torch.randn(200, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@dataclass(frozen=True)
class Usual:
    """One loop.

    Args:
        build: with ``run.options``, what is trained: ``model`` and ``optimizer``, and ``scheduler`` or ``scaler`` where there is one.
        loss_of: (model, batch, number of the step).
        data: of which each batch has 32 samples.
        begin: what is done with the model before each step.
        together: ranks compute a micro-batch together; ``build`` gets their mesh, too.
        pairs: the plain loop adds gradients up in pairs, as Fleet does, and divides their sum, not the losses. What rounding leaves in
            float32 may tip a number of the next forward over to the next one in 16 bits, so there is none between the two. And in float16 a
            loss that is divided first has smaller gradients, of which other ones overflow.
    """

    build: Callable[..., dict[str, Any]]
    loss_of: Callable[[Any, Any, int], Tensor]
    data: Any
    begin: Callable[[nn.Module, int], None] = lambda model, step: None
    pairs: bool = False
    together: bool = False

    def plain(self, feed: Feed) -> Done:
        done = Done(self.build(feed.options))
        model, optimizer = done.objects["model"], done.objects["optimizer"]
        scheduler, scaler = done.objects.get("scheduler"), done.objects.get("scaler")
        for step in feed.steps(STEPS):
            self.begin(model, step)
            optimizer.zero_grad()
            losses, gradients = [], []
            for batch in averaged(model, feed.batches(step, self.data, BATCH)):
                loss = self.loss_of(model, batch, step)
                losses.append(loss.item())
                loss = loss if self.pairs else loss / feed.shards
                (loss if scaler is None else scaler.scale(loss)).backward()
                if self.pairs:
                    gradients.append([each.grad for each in model.parameters()])
                    optimizer.zero_grad()
            for each, found in zip(model.parameters(), zip(*gradients, strict=True), strict=False):
                each.grad = in_pairs(found) / feed.shards
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            done.report(losses)
        return done

    def train(self, run: Any) -> None:
        objects = self.build(run.options, run.mesh["tensor"]) if self.together else self.build(run.options)
        model = objects["model"]
        state = run.track(**objects)
        for step in run.steps(state, total=STEPS):
            self.begin(model, step.number)
            for batch in step.batches(self.data, batch_size=BATCH):
                step.backward(self.loss_of(model, batch, step.number))
            step.commit()
