"""The part of a tensor that this rank has, where ranks that compute together have a part each: PyTorch calls such a tensor a DTensor.

Runs without a mesh have none, and do not import the module of PyTorch that has them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fleet.errors import ConfigError


class InWhole(NamedTuple):
    """Where a rank's part of a tensor begins, and the shape of the whole."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def local(tensor: Any) -> torch.Tensor:
    """The memory that this rank has of ``tensor``: of a plain one the tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def waited(tensor: Any) -> torch.Tensor:
    """The memory of a collective's result, which PyTorch wraps until it is used: here a collective is over when its call returns."""
    found: torch.Tensor = getattr(tensor, "elem", tensor)
    return found


def is_whole(tensor: Any) -> bool:
    """Whether ``tensor`` is a plain one."""
    return not hasattr(tensor, "_local_tensor")


def is_divided(tensor: Any) -> bool:
    """Whether other ranks have other elements of it."""
    return not is_whole(tensor) and any(placement.is_shard() for placement in tensor.placements)


def like(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """``value``, the memory of this rank's part, as a tensor that is divided like ``parameter``."""
    return value if is_whole(parameter) else as_divided(value, parameter.device_mesh, parameter.placements, parameter)


def as_divided(value: torch.Tensor, mesh: Any, placements: Any, whole: Any) -> torch.Tensor:
    """``value``, the memory of this rank's part, as a tensor that is divided so. ``whole`` has the shape and the strides of the whole."""
    from torch.distributed.tensor import DTensor

    stride = whole.stride if isinstance(whole.stride, tuple) else whole.stride()
    found: torch.Tensor = DTensor.from_local(value, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
    return found


def of_parameter(parameter: Any, gradient: Any) -> torch.Tensor:
    """This rank's part of a gradient, divided as the parameter is. All ranks that compute together call it in the same order."""
    if is_whole(gradient):
        return local(gradient)
    if tuple(gradient.placements) != tuple(parameter.placements):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local(gradient)


def offsets(tensor: Any) -> tuple[int, ...]:
    """Where this rank's part begins in the whole."""
    if is_whole(tensor):
        return (0,) * len(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(int(begin) for begin in begins)


def in_whole(tensor: Any) -> InWhole | None:
    """The place of this rank's part of a divided tensor; None of another tensor."""
    return InWhole(offsets(tensor), tuple(tensor.shape)) if is_divided(tensor) else None


def part_of(name: str, live: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``value``, which is that part already, or whole, where ``live`` is divided. Raises ConfigError: another shape."""
    mine = local(live)
    if value.shape == mine.shape:
        return value
    if value.shape != live.shape:
        reason = f"the state to load has the shape {tuple(value.shape)} for it"
        raise ConfigError(name, tuple(live.shape), reason, "Load a checkpoint of the same model.")
    spans = zip(offsets(live), mine.shape, strict=True)
    return value[tuple(slice(start, start + size) for start, size in spans)]


def cut_like(name: str, live: Any, value: Any) -> Any:
    """``value``, whole or this rank's part of it, as a tensor that is divided like ``live``. Raises ConfigError for another shape.

    Where ``live`` has no memory, as another stage has it, the result has none.
    """
    if getattr(live, "is_meta", False) and isinstance(value, torch.Tensor):
        return torch.empty_like(live, dtype=value.dtype)
    if is_whole(live) or not isinstance(value, torch.Tensor) or not is_whole(value):
        return value
    part = part_of(name, live, value)
    return like(live, part if part is value else part.clone())


def whole(value: Any) -> Any:
    """The whole of each divided tensor in a state: all ranks that compute together call it, in the same order."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(each) for each in value)
    if not isinstance(value, torch.Tensor) or is_whole(value):
        return value
    if value.is_meta:  # another stage has it
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.full_tensor()  # type: ignore[attr-defined]
