"""What a unit computes with where its policy casts its parameters (``MixedPrecisionPolicy(param_dtype=...)``).

The parameters that are trained, summed, kept and written stay what they are. Their values in the other type are in a tensor beside each: a
module that reads ``self.weight`` finds that one meanwhile, and whoever asks for its ``parameters()`` or its state finds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from actors.rank.fsdp.taken import Place, Unit


class StandIn:
    """Stands in the place of one parameter while its unit is computed.

    Attributes:
        tensor: which the unit computes with. Its data is set by whoever gathers the unit.

    Args:
        places: where modules have the parameter.
        given: called when the parameter has been given a gradient, which is what the stand-in's was, in the parameter's type.
    """

    def __init__(self, parameter: nn.Parameter, places: Sequence[Place], dtype: torch.dtype, given: Callable[[nn.Parameter], None]) -> None:
        self.parameter, self._places, self._given = parameter, places, given
        self.tensor = nn.Parameter(nothing(parameter, dtype), requires_grad=parameter.requires_grad)
        self._nothing = self.tensor.data
        watch(self.tensor, self._give)

    def enter(self) -> None:
        self.tensor.requires_grad_(self.parameter.requires_grad)
        for module, key in self._places:
            module.__dict__[key] = self.tensor  # an attribute goes before a parameter of that name

    def leave(self) -> None:
        self.tensor.data = self._nothing
        for module, key in self._places:
            module.__dict__.pop(key, None)

    def copy(self) -> None:
        """Have the values of the parameter, which is all here."""
        self.tensor.data = self.parameter.detach().to(self.tensor.dtype)

    def _give(self, tensor: torch.Tensor) -> None:
        """Each backward's gradient is cast and then added up, as FSDP2 adds up what it has reduced."""
        assert tensor.grad is not None
        gradient, tensor.grad = tensor.grad.detach().to(self.parameter.dtype), None
        self.parameter.grad = gradient if self.parameter.grad is None else self.parameter.grad + gradient
        self._given(self.parameter)


def watch(parameter: torch.Tensor, given: Callable[[torch.Tensor], None]) -> None:
    """``given(parameter)`` when a backward has left a gradient there: also of one that is frozen now, and may be thawed."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_post_accumulate_grad_hook(given)
    parameter.requires_grad_(trained)


def stand_ins(unit: Unit, given: Callable[[nn.Parameter], None]) -> dict[int, StandIn]:
    """By ``id`` of a parameter of the unit, what stands in for it, where it is cast at all."""
    dtype = unit.precision.parameters
    if dtype is None:
        return {}
    cast = [each for each in unit.parameters if each.is_floating_point() and each.dtype != dtype]
    return {id(each): StandIn(each, unit.places[id(each)], dtype, given) for each in cast}


def nothing(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the parameter's shape and of one element's memory, which is no number: nobody takes it for a weight."""
    return torch.full((1,), float("nan"), dtype=dtype, device=parameter.device).expand(parameter.shape)
