"""An optimizer takes over the state of another one, each tensor in its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` that keeps the type of each tensor.

    PyTorch casts an optimizer's tensors to the type of the parameter. But NAdam and ASGD hold a factor in float32 for any parameter, and
    others the whole weights in float32 beside bfloat16 ones. After a cast they continue with other bits.
    """
    optimizer.load_state_dict(dict(state))
    if not {"state", "param_groups"} <= state.keys():
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        now = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(number, {}).items():
            cast = now.get(key)
            if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor) and cast.dtype != value.dtype:
                now[key] = value.to(cast.device)
