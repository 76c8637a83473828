"""When the parameters of a unit are gathered and freed: around its forward, and around its backward.

While a unit is freed, its parameters have their shapes, but no memory: code that reads them finds NaN. Each gathering fills the same
storage again. autograd has saved views of it, so a backward finds the values of the forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from actors.rank.fsdp.stand_ins import nothing, stand_ins, watch
from actors.rank.fsdp.taken import Precision, Unit
from actors.rank.mesh.parts import local, of_parameter
from actors.rank.step.flats import collect


class Gathered:
    """One unit in the computation of this rank.

    Attributes:
        here: its parameters are gathered.
        asked: they are on their way into its memory.
        used: its parameters were gathered before.
        casts: the stand-ins of parameters that are cast.

    Args:
        flats: by flat buffer of the unit, its number and length.
        places: (parameter, number of its flat buffer, element at which it begins) of each parameter to gather. This rank has the others
            whole.
        fill: puts the parameters of a flat buffer, by number, into memory of its length.
        behind_backward: called once all gradients are there, if all parameters take part.
        changed: called when the unit is gathered, and when its memory is free again.
    """

    def __init__(
        self,
        unit: Unit,
        flats: Sequence[tuple[int, int]],
        places: Sequence[tuple[nn.Parameter, int, int]],
        fill: Callable[[int, torch.Tensor], None],
        behind_backward: Callable[[Gathered], None] = lambda unit: None,
        changed: Callable[[Gathered], None] = lambda unit: None,
    ) -> None:
        self._behind_backward, self._changed = behind_backward, changed
        self.name, self.modules, self._keeps, self._fill, self._precision = unit.name, unit.modules, unit.keeps, fill, unit.precision
        casts = stand_ins(unit, self._has_gradient)
        self.casts = list(casts.values())
        targets = [casts[id(parameter)].tensor if id(parameter) in casts else parameter for parameter, *_ in places]
        like = {flat: next(target for target, (_, at, _) in zip(targets, places, strict=True) if at == flat) for flat, _ in flats}
        self._flats = {flat: torch.empty(length, dtype=like[flat].dtype, device=like[flat].device) for flat, length in flats}
        strides = [torch.empty_like(local(parameter), device="meta").stride() for parameter, *_ in places]
        self._places = [(parameter, flat, start, stride) for (parameter, flat, start), stride in zip(places, strides, strict=True)]
        self._views = [
            (target, self._flats[flat].as_strided(local(target).shape, stride, start), nothing(local(target), target.dtype))
            for target, (_, flat, start), stride in zip(targets, places, strides, strict=True)
        ]
        gathered = {id(parameter) for parameter, *_ in places}
        self._whole = [each for each in self.casts if id(each.parameter) not in gathered]
        self.here, self.asked, self._entered, self.used = True, False, False, False
        self._in_backward, self._task, self._waited = False, -1, set[int]()
        self.free()
        self._watch([parameter for parameter, *_ in places if id(parameter) not in casts])

    def _watch(self, parameters: Sequence[nn.Parameter]) -> None:
        plainly: Callable[[Any], Any] = torch.compiler.disable  # hooks stay out of compiled graphs
        for module in self.modules:
            module.register_forward_pre_hook(plainly(self._before_forward), prepend=True, with_kwargs=True)
            module.register_forward_hook(plainly(self._behind_forward))
        for parameter in parameters:
            watch(parameter, self._has_gradient)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The tensors that are gathered: the unit's parameters, or their stand-ins."""
        return [parameter for parameter, *_ in self._views]

    def gather(self) -> None:
        """Gather the parameters, unless they are here."""
        self.used = True
        self._enter()
        if self.here:
            return
        for flat, memory in (self._flats if self.asked else self.room()).items():
            self._fill(flat, memory)
        for parameter, view, _ in self._views:
            local(parameter).data = view
        self.here, self.asked = True, False
        self._changed(self)

    def room(self) -> dict[int, torch.Tensor]:
        """Take memory for the parameters: by flat buffer."""
        for memory in self._flats.values():
            memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        return self._flats

    def _enter(self) -> None:
        """Put the stand-ins into the modules."""
        if not self._entered:
            for each in self._whole:
                each.copy()
            for each in self.casts:
                each.enter()
        self._entered = True

    def free(self) -> None:
        """Free the memory of the parameters. Allowed at any time except in a forward or backward."""
        self._empty()
        for each in self.casts:
            each.leave()
        self._entered = False

    def _empty(self) -> None:
        """Free the gathered parameters. Stand-ins of whole parameters stay: later gradients need those of frozen ones."""
        self._in_backward = False
        self._waited.clear()
        if not self.here and not self.asked:
            return
        for parameter, _, empty in self._views:
            local(parameter).data = empty
        for memory in self._flats.values():
            memory.untyped_storage().resize_(0)
        self.here = self.asked = False
        self._changed(self)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _backward() < 0:
            self._in_backward = False  # a backward that did not come to all parameters is over
        self.gather()
        return _cast((args, kwargs), self._precision.inputs)

    def _behind_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._in_backward:  # else activation checkpointing computes the forward again, and the backward frees the unit
            ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if ends and torch.is_grad_enabled():
                torch.autograd.graph.register_multi_grad_hook(ends, self._before_backward, mode="any")
            if not ends or not self._keeps:
                self._empty()
        return _cast(output, self._precision.outputs)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self.gather()
        self._in_backward, self._task = True, _backward()
        self._waited.clear()

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        """A parameter has its gradient: after the last one the unit is freed. If a parameter takes no part, the end of the shard frees it.

        The end of the shard also frees it when a gradient comes in an inner backward (of reentrant checkpointing), as more may come there.
        """
        if self._task != _backward():
            return
        self._waited.add(id(parameter))
        if len(self._waited) == len(self._views):
            self._behind_backward(self)
            self._empty()

    @property
    def passes(self) -> bool:
        """Whether its memory is free between its forward and its backward."""
        return not self._keeps

    @property
    def flats(self) -> list[int]:
        """The numbers of its flat buffers."""
        return list(self._flats)

    @property
    def given(self) -> list[nn.Parameter]:
        """The unit's parameters (not the stand-ins) that have a gradient."""
        return [parameter for parameter, *_ in self._places if parameter.grad is not None]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients that are there."""
        return [local(parameter.grad) for parameter in self.given if parameter.grad is not None]

    def pack(self) -> dict[int, torch.Tensor]:
        """Take the gradients away from the parameters. Gives them by flat buffer, in new memory, with zeros for missing ones."""
        kinds = {flat: parameter.dtype for parameter, flat, *_ in self._places}  # a unit may compute in another type than it sums in
        packed = {flat: torch.zeros(memory.shape, dtype=kinds[flat], device=memory.device) for flat, memory in self._flats.items()}
        views = [packed[flat].as_strided(local(parameter).shape, stride, start) for parameter, flat, start, stride in self._places]
        with torch.no_grad():
            collect([of_parameter(one, one.grad) if one.grad is not None else None for one, *_ in self._places], views, add=False)
        for parameter, *_ in self._places:
            parameter.grad = None
        return packed


def cast_whole(units: Sequence[Unit]) -> Callable[[], None]:
    """Let each unit of a whole model compute in the types of its policy. Gives a function that frees the cast parameters."""
    cast = [unit for unit in units if unit.precision != Precision()]
    found = [Gathered(dataclasses.replace(unit, keeps=True), [], [], lambda flat, memory: None) for unit in cast]

    def free() -> None:
        for each in found:
            each.free()

    return free


def _backward() -> int:
    """Which backward runs in this thread; -1: none."""
    return torch._C._current_graph_task_id()


def _cast(found: Any, dtype: torch.dtype | None) -> Any:
    """``found`` with all floating-point tensors in type ``dtype``. Without a type None: a hook then changes nothing."""
    if dtype is None:
        return None
    return tree_map(lambda each: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each, found)
