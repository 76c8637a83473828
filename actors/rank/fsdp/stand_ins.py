"""Stand-ins: the tensors with which a unit computes where its policy casts its parameters (``MixedPrecisionPolicy(param_dtype=...)``).

The parameters that are trained, summed, kept and written stay in their type. A tensor beside each has its value in the other type. A module
that reads ``self.weight`` finds this tensor meanwhile. Code that calls ``parameters()`` or reads the module's state finds the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from actors.rank.fsdp.taken import Place, Unit


class StandIn:
    """Replaces one parameter while its unit is computed.

    Attributes:
        tensor: the tensor with which the unit computes. :class:`actors.rank.fsdp.gathered.Gathered` sets its data.

    Args:
        places: the modules that have the parameter, each with its name there.
        given: called when the parameter has got the stand-in's gradient, in the parameter's type.
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
        """Take the values of the parameter, which this rank has whole."""
        self.tensor.data = self.parameter.detach().to(self.tensor.dtype)

    def _give(self, tensor: torch.Tensor) -> None:
        """Cast each backward's gradient and then add it up, as FSDP2 does after its reduction."""
        assert tensor.grad is not None
        gradient, tensor.grad = tensor.grad.detach().to(self.parameter.dtype), None
        self.parameter.grad = gradient if self.parameter.grad is None else self.parameter.grad + gradient
        self._given(self.parameter)


def watch(parameter: torch.Tensor, given: Callable[[torch.Tensor], None]) -> None:
    """Call ``given(parameter)`` when a backward has left a gradient there: also for a parameter that is frozen now, and may be thawed."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True).register_post_accumulate_grad_hook(given)
    parameter.requires_grad_(trained)


def stand_ins(unit: Unit, given: Callable[[nn.Parameter], None]) -> dict[int, StandIn]:
    """By ``id`` of a parameter of the unit, its stand-in, if the policy casts it."""
    dtype = unit.precision.parameters
    if dtype is None:
        return {}
    cast = [each for each in unit.parameters if each.is_floating_point() and each.dtype != dtype]
    return {id(each): StandIn(each, unit.places[id(each)], dtype, given) for each in cast}


def nothing(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A NaN tensor of the parameter's shape, with the memory of one element, so that a read is noticed."""
    return torch.full((1,), float("nan"), dtype=dtype, device=parameter.device).expand(parameter.shape)
