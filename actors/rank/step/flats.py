"""Sets of flat gradient buffers: how they are laid out, the views in them, and how gradients come into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from actors.rank.mesh.parts import is_divided, like, local

ALIGNMENT = 64
"""Elements; each parameter's part of a flat buffer begins at a multiple of it.

No vector register is longer. So the same instructions compute a stretch between two multiples, alone or within the whole parameter.
Otherwise the elements left over at an end of a stretch would round differently in 16-bit types.
"""

ALL = -1
"""As bits: all parameters."""

Tensors = Sequence[torch.Tensor]
ONE_OWNER: Mapping[int, int] = MappingProxyType({})
Key = tuple[torch.dtype, torch.device, bool, int, int]
"""(dtype, device, divided, unit, optimizer): tensors with the same key share a flat buffer.

Ranks that compute together have a part each of a divided parameter, and all have the whole of others. A unit is a part of the model as
``fully_shard`` has cut it, and is gathered by itself. A step may take one optimizer alone.
"""


@dataclass(frozen=True)
class FlatPlace:
    flat: int
    start: int
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, flats: Tensors) -> torch.Tensor:
        """The view of this place in ``flats``, with the strides of its parameter or buffer."""
        return flats[self.flat].as_strided(self.shape, self.strides, self.start)


class FlatLayout:
    """How gradients lie in a set of flat buffers, and behind them the changes that forwards make to buffers of the modules.

    Args:
        units: by ``id`` of a parameter, the unit that it belongs to, where that is not the first one, 0.
        leave: gradients of units leave the rank in the backward: other code sums them, and no flat buffer here keeps them.
        owners: by ``id`` of a parameter, the number of its optimizer, where that is not the first one, 0.

    Attributes:
        lengths: of the flat buffers, by key.
        gradients, changes: the place of each parameter's gradient, and of each averaged buffer's change.
        places: by parameter, (flat buffer, element) at which its gradient begins, in the order of its memory.
        extents: by flat buffer, how many of its first elements are gradients; changes of buffers follow them.
        leaving: the flat buffers whose gradients leave the rank in the backward.
        optimizers: by flat buffer, the number of the optimizer that its gradients are for.
        divided: the flat buffers of divided parameters. ``units``: the unit of each flat buffer.
        meta: one set of flat buffers, without memory.
    """

    def __init__(
        self, parameters: Tensors, averaged: Tensors, units: Mapping[int, int], *, leave: bool, owners: Mapping[int, int] = ONE_OWNER
    ) -> None:  # fmt: skip
        self.lengths: dict[Key, int] = {}
        self.gradients = [self._place(one, units.get(id(one), 0), owners.get(id(one), 0)) for one in parameters]
        self.places = [(place.flat, place.start) for place in self.gradients]
        self.extents = list(self.lengths.values())
        self.changes = [self._place(buffer) for buffer in averaged]
        self.extents += [0] * (len(self.lengths) - len(self.extents))
        self.leaving = frozenset(flat for flat, (*_, unit, _) in enumerate(self.lengths) if leave and unit)
        self._parameters_of: dict[int, int] = {}
        self.optimizers = [optimizer for *_, optimizer in self.lengths]
        self.units = [unit for *_, unit, _ in self.lengths]
        self.divided = frozenset(flat for flat, (_, _, divided, *_) in enumerate(self.lengths) if divided)
        self.meta = [torch.empty(length, dtype=dtype, device="meta") for (dtype, *_), length in self.lengths.items()]

    def flats_of(self, optimizers: int) -> list[int]:
        """The flat buffers that have gradients for these optimizers, which are bits."""
        return [flat for flat, owner in enumerate(self.optimizers) if optimizers >> owner & 1]

    def parameters_of(self, optimizers: int) -> int:
        """The parameters of these optimizers. Both sets are bits."""
        if optimizers not in self._parameters_of:
            owners = [self.optimizers[place.flat] for place in self.gradients]
            self._parameters_of[optimizers] = sum(1 << number for number, owner in enumerate(owners) if optimizers >> owner & 1)
        return self._parameters_of[optimizers]

    def _place(self, like: torch.Tensor, unit: int = 0, optimizer: int = 0) -> FlatPlace:
        key = (like.dtype, like.device, is_divided(like), unit, optimizer)
        like = local(like)
        start = self.lengths.get(key, 0)
        self.lengths[key] = start + -(-like.numel() // ALIGNMENT) * ALIGNMENT
        return FlatPlace(list(self.lengths).index(key), start, like.shape, torch.empty_like(like, device="meta").stride())


class GradientSet:
    """One set of flat buffers, and its views in order of parameters and of averaged buffers.

    Flat buffers whose gradients leave the rank in the backward are empty, and their parameters have no view.

    Attributes:
        present: of a mean, the parameters with a gradient in at least one shard, as bits. The gradient of all others is None.
        elsewhere: of a mean, the parameters of other stages with a gradient.
    """

    present = ALL
    elsewhere: Sequence[Any] = ()

    def __init__(self, layout: FlatLayout) -> None:
        found = enumerate(layout.lengths.items())
        self.flats: list[Any] = [
            torch.zeros(0 if flat in layout.leaving else length, dtype=dtype, device=device)
            for flat, ((dtype, device, *_), length) in found
        ]
        self.gradients = [None if place.flat in layout.leaving else place.view(self.flats) for place in layout.gradients]
        self.changes = [place.view(self.flats) for place in layout.changes]
        self._shown: list[torch.Tensor | None] = []

    def shown(self, parameters: Tensors) -> Sequence[torch.Tensor | None]:
        """The views of the parameters' gradients, divided as these are. They are made once: for a DTensor that takes 50 us each."""
        if not self._shown:
            self._shown = [None if view is None else like(one, view) for one, view in zip(parameters, self.gradients, strict=True)]
        return self._shown

    def divide(self, divisor: float) -> None:
        """Divide all floating-point and complex buffers."""
        for flat in self.flats:
            if flat.is_floating_point() or flat.is_complex():
                flat.div_(divisor)


def collect(values: Sequence[torch.Tensor | None], into: Sequence[torch.Tensor], add: bool, times: float = 1.0) -> None:
    """Copy or add each value to its place. None is zero, sparse gradients become dense, and the values are detached from their graph.

    ``times``: a power of two; each value is multiplied with it first, without rounding.
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
