"""When the parameters of a unit are gathered, and when they are let go: around its forward, and around its backward.

While a unit is let go, its parameters have their shapes, but no memory: whoever reads them finds NaN. The memory that autograd has saved
views of is the same for each gathering (its storage is emptied and filled again), so a backward finds there what the forward had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from actors.rank.fsdp.taken import Unit


class Gathered:
    """One unit, as this rank computes it.

    Attributes:
        here: its parameters are.
        used: they were gathered before.

    Args:
        flats: by flat buffer of the unit, its number and length.
        places: by parameter, (number of the flat buffer, element at which it begins).
        fill: (number of a flat buffer, memory of its length): the parameters are to be there when it returns.
        behind_backward: is called once all gradients are there, if all parameters take part.
    """

    def __init__(
        self,
        unit: Unit,
        flats: Sequence[tuple[int, int]],
        places: Sequence[tuple[nn.Parameter, int, int]],
        fill: Callable[[int, torch.Tensor], None],
        behind_backward: Callable[[Gathered], None] = lambda unit: None,
    ) -> None:
        self._behind_backward = behind_backward
        self.name, self.modules, self._keeps, self._fill = unit.name, unit.modules, unit.keeps, fill
        like = {flat: next(parameter for parameter, at, _ in places if at == flat) for flat, _ in flats}
        self._flats = {flat: torch.empty(length, dtype=like[flat].dtype, device=like[flat].device) for flat, length in flats}
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter, *_ in places]
        self._places = [(parameter, flat, start, stride) for (parameter, flat, start), stride in zip(places, strides, strict=True)]
        self._views = [
            (parameter, self._flats[flat].as_strided(parameter.shape, stride, start), _nothing(parameter))
            for (parameter, flat, start), stride in zip(places, strides, strict=True)
        ]
        self.here, self.used = True, False
        self._in_backward, self._waited = False, 0
        self.let_go()
        for module in unit.modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            module.register_forward_hook(self._behind_forward)
        for parameter, *_ in places:
            parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def gather(self) -> None:
        """The parameters are here."""
        self.used = True
        if self.here:
            return
        for flat, memory in self._flats.items():
            memory.untyped_storage().resize_(memory.numel() * memory.element_size())
            self._fill(flat, memory)
        for parameter, view, _ in self._views:
            parameter.data = view
        self.here = True

    def let_go(self) -> None:
        """Their memory is free. Allowed at any time."""
        self._in_backward, self._waited = False, 0
        if not self.here:
            return
        for parameter, _, nothing in self._views:
            parameter.data = nothing
        for memory in self._flats.values():
            memory.untyped_storage().resize_(0)
        self.here = False

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.gather()

    def _behind_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward:  # activation checkpointing computes the forward again; the backward lets go
            return
        ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if ends and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(ends, self._before_backward, mode="any")
        if not ends or not self._keeps:
            self.let_go()

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self.gather()
        self._in_backward = True

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        """The last one lets the unit go. One that takes no part is never told of; then the end of the shard does."""
        self._waited += 1
        if self._waited == len(self._views):
            self._behind_backward(self)
            self.let_go()

    @property
    def flats(self) -> list[int]:
        """The numbers of its flat buffers."""
        return list(self._flats)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Those that are there."""
        return [parameter.grad for parameter, *_ in self._places if parameter.grad is not None]

    def pack(self) -> dict[int, torch.Tensor]:
        """By flat buffer, its gradients, in memory of their own; the parameters have none any more. Where there is none it is zero."""
        packed = {flat: torch.zeros(memory.shape, dtype=memory.dtype, device=memory.device) for flat, memory in self._flats.items()}
        for parameter, flat, start, stride in self._places:
            if parameter.grad is not None:
                found = parameter.grad.detach()
                packed[flat].as_strided(parameter.shape, stride, start).copy_(found.to_dense() if found.is_sparse else found)
                parameter.grad = None
        return packed


def _nothing(parameter: torch.Tensor) -> torch.Tensor:
    """Of the parameter's shape and of one element's memory, which is no number: nobody takes it for a weight."""
    return torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
