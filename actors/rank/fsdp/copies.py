"""Copies of the weights, such as averages, where no rank has the weights whole: Fleet refuses them by name.

Such a copy would read NaN from memory that was freed. Tracked copies are found before the first step. Others are found when a function of
``step.on_commit`` reads a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from actors.rank.fsdp.gathered import Gathered
from actors.rank.state.tracked import TrackedState
from fleet.errors import ConfigError, LoopError

WAY_OUT = "Keep an average of the weights in the optimizer's state, element by element: see docs/parameter-sharding.md."
HARMLESS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"})
"""Methods of a tensor that do not read its elements, beside its attributes."""


def check_copies(state: TrackedState) -> None:
    """Raises ConfigError for a tracked object with a copy of parameters that will be in chunks."""
    modules = state.modules.values()
    shapes = {name: one.shape for module in modules for name, one in module.named_parameters() if one.requires_grad}
    for name, one in state.objects.items():
        if isinstance(one, AveragedModel):
            raise ConfigError("track", name, "an AveragedModel reads all of the parameters, of which each rank has a part", WAY_OUT)
        if isinstance(one, (torch.nn.Module, torch.optim.Optimizer)):
            continue
        for key, value in _tensors(one.state_dict()):
            if shapes.get(key) == value.shape:
                reason = f"it has a copy of the parameter {key}, which no rank has whole"
                raise ConfigError("track", name, reason, WAY_OUT)


def _tensors(found: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested mappings, each with its key in the innermost mapping."""
    if isinstance(found, torch.Tensor):
        yield at, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from _tensors(value, str(key))


class Unread(TorchFunctionMode):
    """Raises LoopError when code reads a parameter whose unit is freed.

    Args:
        units: by ``id`` of a parameter, its name and its unit.
    """

    def __init__(self, units: Mapping[int, tuple[str, Gathered]]) -> None:
        super().__init__()
        self._units = units

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not _is_harmless(func):
            for leaf in tree_leaves((args, given)):
                name, unit = self._units.get(id(leaf), ("", None))
                if unit is not None and not unit.here:
                    raise LoopError(f"a function given to step.on_commit read {name}, which no rank has whole there. {WAY_OUT}")
        return func(*args, **given)


def _is_harmless(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in HARMLESS or (name == "__get__" and func.__self__ is not torch.Tensor.data)
