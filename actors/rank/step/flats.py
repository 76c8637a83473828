"""One set of flat gradient buffers, with the views in it, and how gradients come into them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALL = -1
"""As bits: all parameters."""

Key = tuple[torch.dtype, torch.device, int]
"""What shares a flat buffer: also of one unit, as ``fully_shard`` has cut the model, so that a unit is gathered by itself."""


@dataclass(frozen=True)
class FlatPlace:
    flat: int
    start: int
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """This place in ``flats``, with the strides of the tensor that it stands for."""
        return flats[self.flat].as_strided(self.shape, self.strides, self.start)


class GradientSet:
    """One set of flat buffers, and its views in order of parameters and of averaged buffers.

    Flat buffers whose gradients leave the rank in the backward (``leave``) are empty, and their parameters have no view.

    Attributes:
        present: of a mean, the parameters that have a gradient, as bits: of some shard at least. That of all others is None.
    """

    present = ALL

    def __init__(
        self, lengths: Mapping[Key, int], parameters: Sequence[FlatPlace], averaged: Sequence[FlatPlace], leave: Collection[int] = ()
    ) -> None:
        found = enumerate(lengths.items())
        self.flats: list[Any] = [
            torch.zeros(0 if flat in leave else length, dtype=dtype, device=device) for flat, ((dtype, device, _), length) in found
        ]
        self.gradients = [None if place.flat in leave else place.view(self.flats) for place in parameters]
        self.changes = [place.view(self.flats) for place in averaged]


def collect(values: Sequence[torch.Tensor | None], into: Sequence[torch.Tensor], add: bool, times: float = 1.0) -> None:
    """Copy or add each value to its place. None is zero, sparse gradients become dense, and graphs of gradients are left behind.

    ``times``: a power of two that each is multiplied with first, so without rounding.
    """
    found = [(_dense(value), place) for value, place in zip(values, into, strict=True) if value is not None]
    if not add:
        for value, place in zip(values, into, strict=True):
            if value is None:
                place.zero_()
    for dtype in dict.fromkeys(place.dtype for _, place in found):
        some = [(value, place) for value, place in found if place.dtype == dtype]
        places, found_values = [place for _, place in some], [value for value, _ in some]
        if add:
            torch._foreach_add_(places, found_values, alpha=times) if times != 1.0 else torch._foreach_add_(places, found_values)
        else:
            torch._foreach_copy_(places, found_values)
            if times != 1.0:
                torch._foreach_mul_(places, times)


def _dense(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.to_dense() if value.is_sparse else value
