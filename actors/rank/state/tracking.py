"""Prepares the objects of ``run.track`` for this run's layout of the state. An object that does not fit the layout is refused by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from actors.rank.fsdp.copies import check_copies
from actors.rank.fsdp.gathered import cast_whole
from actors.rank.fsdp.room import check
from actors.rank.fsdp.taken import Unit
from actors.rank.state.room import free_bytes
from actors.rank.state.tracked import StageCut, TrackedState
from actors.rank.state.weights import WeightFiles, load_weights
from actors.rank.zero1.chunked import check_tracked
from fleet.errors import ConfigError
from fleet.settings.run import RunSettings


def tracked(
    objects: Mapping[str, Any],
    units: Sequence[Unit],
    weights: str | os.PathLike[str] | None,
    settings: RunSettings,
    device_of: Callable[[], torch.device],
    stages: Callable[[], StageCut] = StageCut,
) -> TrackedState:
    """The state of ``objects``, with the first weights from ``weights``. ``units``: those of ``fully_shard``.

    Args:
        device_of: gives this rank's device; called only where the device matters.
        stages: says which layers of a model are another stage's.

    Raises:
        ConfigError: see :meth:`actors.rank.loop.Run.track`.
    """
    _check_stepped(objects)
    chunked = settings.optimizer_sharding == "fsdp"
    modules = {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}
    device = device_of() if weights is not None or (units and chunked) else torch.device("cpu")
    files, cut = WeightFiles(weights) if weights is not None else None, stages()
    readers = load_weights(modules, files, device, chunked=chunked, elsewhere=cut.elsewhere)
    state = TrackedState(**objects)
    state.cut(cut)
    _check_shared(state)
    state.readers, state.units = readers, units
    state.casts = any(unit.precision.parameters is not None for unit in units)
    if units and chunked:
        state.ahead = check(units, free_bytes(device))
    if not chunked:
        state.free = cast_whole(units)
    if settings.optimizer_sharding != "none":
        check_tracked(state, settings.threads_per_rank)
    if chunked:
        check_copies(state)
    return state


def _check_stepped(objects: Mapping[str, Any]) -> None:
    """Raises ConfigError where ``step.commit()`` cannot step an object: its ``step`` needs arguments or sparse gradients."""
    for name, one in objects.items():
        if isinstance(one, torch.optim.SparseAdam):
            reason = "it takes sparse gradients, and gradients are summed over ranks as dense ones"
            raise ConfigError(name, type(one).__name__, reason, "Take Adam or SGD: embeddings with sparse=True train with them, too.")
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            continue  # step.plateau() gives its argument
        if isinstance(one, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            given = list(inspect.signature(type(one).step).parameters.values())[1:]
            needs = [each.name for each in given if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
            if needs:
                reason = f"step.commit() steps it, and its step needs {needs[0]}, which only the loop has"
                way_out = "Take another optimizer." if isinstance(one, torch.optim.Optimizer) else "Do not track it: set the rate by hand."
                raise ConfigError(name, type(one).__name__, reason, way_out)


def _check_shared(state: TrackedState) -> None:
    """Raises ConfigError: an optimizer has a parameter of no tracked module. Ranks would not sum its gradients or send it to others."""
    known = {id(one) for module in state.modules.values() for one in module.parameters()}
    for name, optimizer in state.optimizers.items():
        for at, one in enumerate(one for group in optimizer.param_groups for one in group["params"]):
            if id(one) in known:
                continue
            reason = f"its parameter {at}, of shape {tuple(one.shape)}, belongs to no tracked module, so ranks would not share its gradient"
            lists = "Modules in a plain list or dict are not part of a module: use nn.ModuleList or nn.ModuleDict."
            raise ConfigError(name, type(optimizer).__name__, reason, f"Track its module, too: run.track(model=..., other=...). {lists}")
