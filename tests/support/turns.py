"""Loops with several optimizers, and with the gradient of a gradient, of a model that ranks may keep in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.loops import Model, cut, groups
from tests.support.trains import Numbers

TOGETHER = 3


def two(run: Any) -> dict[str, Any]:
    """Each unit has parameters of both."""
    model = Model(2)
    cut(run.mesh, model)
    matrices = torch.optim.AdamW([each for each in model.parameters() if each.ndim > 1], lr=2e-3)
    vectors = torch.optim.SGD([each for each in model.parameters() if each.ndim < 2], lr=1e-3, momentum=0.9)
    slower = torch.optim.lr_scheduler.ExponentialLR(vectors, 0.9)
    return {"model": model, "matrices": matrices, "vectors": vectors, "slower": slower}


def in_turn(run: Any) -> None:
    """Two steps of the one, then one of the other; none is counted without the others. Which one learns when is noted."""
    objects = two(run)
    matrices, vectors = objects["matrices"], objects["vectors"]
    state = run.track(**objects)
    for step in run.steps(state, total=int(run.options["steps"]), together=TOGETHER, clip_norm={matrices: 1.0, vectors: 0.5}):
        _compute(step, objects["model"])
        step.commit(vectors if step.number % TOGETHER == TOGETHER - 1 else matrices)


def as_one(run: Any) -> None:
    """Both take each step."""
    objects = two(run)
    state = run.track(**objects)
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        _compute(step, objects["model"])
        step.commit()


def penalized(run: Any) -> None:
    """One optimizer; the slope of the model at its samples is a part of the loss."""
    model = Model(2)
    cut(run.mesh, model)
    state = run.track(model=model, optimizer=torch.optim.AdamW(groups(model)))
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        _compute(step, model, 0.01)
        step.commit()


KINDS: dict[str, Callable[[Any], None]] = {kind.__name__: kind for kind in (in_turn, as_one, penalized)}


def train(run: Any) -> None:
    torch.manual_seed(3)
    KINDS[run.options["kind"]](run)
    run.save(Path(run.options["flags"]) / "model.pt")


def _compute(step: Any, model: Model, penalty: float = 0.0) -> None:
    for x, y in step.batches(Numbers(), batch_size=64):
        step.backward(_loss(model, x, y, penalty))
    time.sleep(0.02)


def _loss(model: Model, x: Tensor, y: Tensor, penalty: float) -> Tensor:
    if not penalty:
        return (model(x) - y).square().mean()
    x = x.clone().requires_grad_()
    found = model(x)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return (found - y).square().mean() + penalty * slope.square().sum(1).mean()
