"""An average of the weights and buffers by PyTorch's own class, which is judged in the place of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.zoo.feed import Done, Feed, Twice, averaged

STEPS, BATCH, WIDTH = 24, 64, 12
DATA = torch.utils.data.TensorDataset(torch.randn(200, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64))


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return {"model": model, "optimizer": torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5), "average": average}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(1) - x.sum(1)).square().mean()


def judged(average: nn.Module) -> dict[str, float]:
    average.eval()
    with torch.no_grad():
        return {"val_loss": float(loss_of(average, DATA.tensors[0]))}


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer, average = done.objects.values()
    for step in feed.steps(STEPS):
        optimizer.zero_grad()
        losses = []
        for (x,) in averaged(model, feed.batches(step, DATA, BATCH)):
            loss = loss_of(model, x)
            (loss / feed.shards).backward()
            losses.append(loss.item())
        optimizer.step()
        average.update_parameters(model)
        done.report(losses)
        if (step + 1) % 8 == 0:
            done.judged(step + 1, judged(average))
    return done


def train(run: Any) -> None:
    objects = build(run.options)
    model, _, average = objects.values()
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        for (x,) in step.batches(DATA, batch_size=BATCH):
            step.backward(loss_of(model, x))
        step.on_commit(lambda: average.update_parameters(model))
        step.commit()
        run.evaluate(lambda: judged(average), every=8)


LOOP = Twice(build, plain, train)
