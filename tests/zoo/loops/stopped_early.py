"""Early stopping on a plateau: a validation loss that is noisy and falls no further reduces the rate, then ends the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fleet
from tests.zoo.feed import Done, Feed, Twice
from tests.zoo.usual import rows

STEPS, BATCH, EVERY, PATIENCE = 200, 32, 2, 6
MIN_DELTA = 0.05


def build(options: Mapping[str, str]) -> dict[str, Any]:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=MIN_DELTA, threshold_mode="abs")
    return {"model": model, "optimizer": optimizer, "plateau": plateau}


TRAIN, HELD_OUT = rows(4, 1), rows(4, 2)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(1) - x.sum(1).sin()).square().mean()


def validate(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"val_loss": float(loss_of(model, HELD_OUT))}


def plain(feed: Feed) -> Done:
    done = Done(build(feed.options))
    model, optimizer, plateau = done.objects["model"], done.objects["optimizer"], done.objects["plateau"]
    best, waited = float("inf"), 0
    for step in feed.steps(STEPS):
        if step and step % EVERY == 0:
            figures = validate(model)
            done.judged(step, figures)
            better = best - figures["val_loss"] > MIN_DELTA
            best, waited = (figures["val_loss"], 0) if better else (best, waited + 1)
            if waited == PATIENCE:
                break
            plateau.step(figures["val_loss"])
        optimizer.zero_grad()
        losses = []
        for batch in feed.batches(step, TRAIN, BATCH):
            loss = loss_of(model, batch)
            losses.append(loss.item())
            (loss / feed.shards).backward()
        optimizer.step()
        done.report(losses)
    return done


def train(run: fleet.Run) -> None:
    objects = build(run.options)
    model, stopping = objects["model"], fleet.EarlyStopping(PATIENCE, min_delta=MIN_DELTA)
    state = run.track(**objects)
    for step in run.steps(state, total=STEPS):
        if figures := run.evaluate(lambda: validate(model), every=EVERY):
            if stopping.update(figures["val_loss"]):
                run.stop(f"val_loss has not fallen below {stopping.best:.3f} for {stopping.waited} evaluations")
                break
            step.plateau(figures["val_loss"])
        for batch in step.batches(TRAIN, batch_size=BATCH):
            step.backward(loss_of(model, batch))
        step.commit()


LOOP = Twice(build, plain, train)
