"""Train functions for tests, of models as users have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.trains import Numbers, build, cut_of

WIDTH = 1021


def _train(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, **weights: str) -> None:
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler, **weights)
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            step.backward(((model(x) - y) ** 2).mean())
        step.commit()


def loads_its_weights(run: Any) -> None:
    """Built in memory, and given its weights by load_state_dict."""

    def loaded(model: nn.Sequential) -> None:
        model.load_state_dict(load_file(run.options["weights"]))
        cut_of(run)(model)

    _train(run, *build(WIDTH, "layer", loaded))


def is_built_on_meta(run: Any) -> None:
    """It has shapes alone, until Fleet reads its weights."""
    with torch.device("meta"):
        model, optimizer, scheduler = build(WIDTH, "layer", cut_of(run))
    _train(run, model, optimizer, scheduler, weights=run.options["weights"])
