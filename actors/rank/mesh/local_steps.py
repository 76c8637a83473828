"""Optimizers step the memory that this rank has of divided parameters, as plain tensors: DTensor dispatches each operation in Python.

Element by element the bits are the same. Other optimizers, which may need the whole of a parameter, step the DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from actors.rank.mesh.parts import is_whole, like, local
from actors.rank.zero1.chunked import ELEMENTWISE


@contextmanager
def on_local_memory(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context of one step. Behind it parameters, gradients and state are divided as before."""
    if type(optimizer) not in ELEMENTWISE:
        yield
        return
    wholes = [list(group["params"]) for group in optimizer.param_groups]
    divided = {id(one): local(one) for whole in wholes for one in whole if not is_whole(one)}
    for whole in wholes:
        for one in whole:
            if id(one) in divided:
                divided[id(one)].grad = None if one.grad is None else local(one.grad)
                if one in optimizer.state:
                    optimizer.state[divided[id(one)]] = {key: local(value) for key, value in optimizer.state[one].items()}
    for group, whole in zip(optimizer.param_groups, wholes, strict=True):
        group["params"] = [divided.get(id(one), one) for one in whole]
    try:
        yield
    finally:
        for group, whole in zip(optimizer.param_groups, wholes, strict=True):
            group["params"] = whole
            for one in whole:
                if (mine := divided.get(id(one))) is not None:
                    mine.grad = None
                    _give_back(optimizer.state, one, mine)


def _give_back(state: Any, parameter: torch.Tensor, mine: torch.Tensor) -> None:
    """The state of ``mine`` becomes that of ``parameter``. Values that the step has changed in place are the same objects as before."""
    stepped = state.pop(mine, None)
    if stepped is None:
        return
    before = state[parameter]
    for key, value in stepped.items():
        if local(before.get(key)) is not value:
            cut = isinstance(value, torch.Tensor) and value.dim() and value.shape == mine.shape
            before[key] = like(parameter, value) if cut else value
