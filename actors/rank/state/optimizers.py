"""An optimizer takes over the state of another one, each tensor in its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from actors.rank.mesh.parts import cut_like, is_whole

ONE_A_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""Values of an optimizer's state that are one number for a parameter, also if the parameter has a single element."""


def values_an_element(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """How many values the state of an element-wise optimizer of ``torch.optim`` has for each element of a parameter of ``group``."""
    name, given = type(optimizer).__name__, {key: bool(group.get(key)) for key in ("momentum", "amsgrad", "centered")}
    if name == "SGD":
        return int(given["momentum"])
    return {"Adagrad": 1, "ASGD": 1, "RMSprop": 1 + given["momentum"] + given["centered"]}.get(name, 2 + given["amsgrad"])


def is_cut(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether this value of a parameter's state has one element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in ONE_A_PARAMETER


def _cut(parameter: torch.Tensor, key: str, value: Any) -> Any:
    """A value of a parameter's state, divided as the parameter is: such as a moment, and not such as a number of steps."""
    if not isinstance(value, torch.Tensor) or key in ONE_A_PARAMETER:
        return value
    there = value.dim() == parameter.dim() > 0
    lacking = parameter.is_meta and (value.dim() == parameter.dim() or not value.numel())
    return cut_like(key, parameter, value) if there or lacking else value


def load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` that keeps the type of each tensor.

    PyTorch casts an optimizer's tensors to the type of the parameter. But NAdam and ASGD hold a factor in float32 for any parameter, and
    others the whole weights in float32 beside bfloat16 ones. After a cast they continue with other bits.
    """
    if not {"state", "param_groups"} <= state.keys():
        optimizer.load_state_dict(dict(state))
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    live = dict(zip(numbers, parameters, strict=True))
    divided = {number: {key: _cut(live[number], key, value) for key, value in each.items()} for number, each in state["state"].items()}
    optimizer.load_state_dict({**state, "state": divided})
    for number, parameter in zip(numbers, parameters, strict=True):
        now = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(number, {}).items():
            cast = now.get(key)
            if not is_whole(cast):
                continue
            if parameter.is_meta and isinstance(value, torch.Tensor) and value is divided[number][key]:
                now[key] = value  # alike in all stages
            if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != value.dtype:
                now[key] = value.to(cast.device)
