"""The plain values of torch and numpy: sizes, dtypes and devices, arrays and their scalars. A number stands for each tensor."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
import torch

from fleet.protocol.plain import Format, Kind, NotPlain


def _checked(kind: np.dtype[Any], of: object) -> str:
    """A dtype as text. Raises NotPlain for a dtype that its text does not fully describe."""
    if kind.hasobject or kind.kind == "V" or np.dtype(kind.str) != kind:
        raise NotPlain(f"{type(of).__module__}.{type(of).__qualname__}", f"its elements are {kind}")
    return kind.str


def _dtype(text: str) -> np.dtype[Any]:
    kind = np.dtype(text)
    if kind.hasobject or kind.kind == "V":
        raise ValueError(f"{text} is no dtype of plain numbers")
    return kind


def _write_array(value: np.ndarray[Any, Any]) -> list[Any]:
    """Write an array with its memory order, so that sums over it have the same bits."""
    order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return [_checked(value.dtype, value), order, list(value.shape), base64.b64encode(value.tobytes(order)).decode()]


def _read_array(kind: str, order: str, shape: list[int], data: str) -> np.ndarray[Any, Any]:
    if order not in ("C", "F"):
        raise ValueError(f"{order!r} is no order")
    dtype, filled = _dtype(kind), bytearray(base64.b64decode(data, validate=True))
    if any(type(each) is not int or each < 0 for each in shape) or dtype.itemsize * int(np.prod(shape, dtype=object)) != len(filled):
        raise ValueError(f"{len(filled)} bytes are no array of {shape} {dtype}")
    if not filled:
        return np.zeros(tuple(shape), dtype)
    return np.ndarray(tuple(shape), dtype, filled, order="F" if order == "F" else "C")


def _write_scalar(value: np.generic) -> list[Any]:
    whole = np.asarray(value)  # the dtype and the bytes of a scalar of empty text do not match
    return [_checked(whole.dtype, value), base64.b64encode(whole.tobytes()).decode()]


def _read_scalar(kind: str, data: str) -> Any:
    return _read_array(kind, "C", [], data)[()]


def _read_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def _read_device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device") from error


KINDS = (
    Kind("size", (torch.Size,), list, lambda *sizes: torch.Size(sizes)),
    Kind("dtype", (torch.dtype,), lambda value: [str(value).removeprefix("torch.")], _read_dtype),
    Kind("device", (torch.device,), lambda value: [str(value)], _read_device),
    Kind("array", (np.ndarray,), _write_array, _read_array),
    Kind("scalar", (np.generic,), _write_scalar, _read_scalar, derived=True),
)
PLAIN = Format(KINDS, references=(torch.Tensor,))
"""The format in which ranks write and read plain values."""
