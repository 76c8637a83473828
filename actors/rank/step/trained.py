"""Which parameters of the tracked modules train: a loop may freeze and thaw them between steps."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

from torch import nn

from actors.rank.step.flats import ALL
from fleet.errors import ConfigError

PLACED, NEVER = 2, 4
"""Bits of a parameter's mark; see :meth:`TrainedParameters.marks`."""


class TrainedParameters:
    """The parameters of ``modules`` that have required a gradient once.

    Args:
        modules: by name.
        fixed: why no further parameter, except ``known`` ones, may require a gradient later; empty where one may.
        known: ids of parameters that count as trained, though they require no gradient now.
        elsewhere: ids of those that another stage has.

    Attributes:
        parameters: in order. A new list object when they change.
        stepped: the parameters that have had a gradient in a step, as bits; all before the first step.
    """

    def __init__(self, modules: Mapping[str, nn.Module], fixed: str, known: Collection[int], elsewhere: Collection[int] = ()) -> None:
        self._elsewhere = elsewhere
        self._modules, self._fixed, self._placed, self.stepped = modules, fixed, set(known), ALL
        self._find()
        self._first = self._marks()

    def _find(self) -> None:
        named = {f"{root}.{name}": p for root, module in self._modules.items() for name, p in module.named_parameters()}
        for name, parameter in named.items():
            if nn.parameter.is_lazy(parameter):
                raise ConfigError("model", name, "this parameter has no shape yet", "Run the model once before it is tracked.")
        unique = {id(parameter): parameter for parameter in named.values()}
        self._names = {id(parameter): name for name, parameter in reversed(named.items())}
        self._all = list(unique.values())
        self._flags = [parameter.requires_grad for parameter in self._all]
        self._placed |= {id(parameter) for parameter in self._all if parameter.requires_grad}
        self._everywhere = [parameter for parameter in self._all if id(parameter) in self._placed]
        self.parameters = [parameter for parameter in self._everywhere if id(parameter) not in self._elsewhere]
        self._numbers = [number for number, one in enumerate(self._everywhere) if id(one) not in self._elsewhere]

    @property
    def count(self) -> int:
        """The number of parameters of all stages."""
        return len(self._everywhere)

    def of_all(self, bits: int) -> int:
        """``bits`` of this rank's parameters as bits of those of all stages."""
        if not self._elsewhere or bits == ALL:
            return bits
        return sum(1 << everywhere for number, everywhere in enumerate(self._numbers) if bits >> number & 1)

    def of_mine(self, bits: int) -> tuple[int, list[nn.Parameter]]:
        """Inverse of :meth:`of_all`, and the parameters of other stages that are in ``bits``."""
        if not self._elsewhere:
            return bits, []
        mine = sum(1 << number for number, everywhere in enumerate(self._numbers) if bits >> everywhere & 1)
        others = [one for number, one in enumerate(self._everywhere) if bits >> number & 1 and id(one) in self._elsewhere]
        return mine, others

    @property
    def checksum(self) -> int:
        """Of which parameters are trained, so that two ranks can compare: a loop body may change that."""
        return zlib.crc32(bytes(id(parameter) in self._placed for parameter in self._all))

    def look(self) -> bool:
        """Whether the loop body has frozen or thawed parameters. Raises ConfigError: it has thawed one that may not train."""
        flags = [parameter.requires_grad for parameter in self._all]
        if flags == self._flags:
            return False
        new = [one for one in self._all if one.requires_grad and id(one) not in self._placed]
        if new and self._fixed:
            way_out = 'Let it require a gradient at run.track, and freeze it right after that; or set optimizer_sharding = "none".'
            raise ConfigError("requires_grad", self._names[id(new[0])], self._fixed, way_out)
        if new:
            self._find()
        self._flags = flags
        return True

    def marks(self) -> str | None:
        """The marks of all parameters, for :meth:`mark`; None while all are as at first.

        A mark is the sum of 1: it requires a gradient; ``PLACED``: it has required one once; ``NEVER``: it had none in any step yet.
        """
        marks = self._marks()
        return None if marks == self._first else marks

    def _marks(self) -> str:
        numbers = {id(one): number for number, one in enumerate(self.parameters)}
        never = [id(one) in numbers and not self.stepped >> numbers[id(one)] & 1 for one in self._all]
        found = zip(self._all, never, strict=True)
        return "".join(str(one.requires_grad + PLACED * (id(one) in self._placed) + NEVER * no) for one, no in found)

    def mark(self, marks: str | None) -> bool:
        """Take over the marks of another rank or a checkpoint. True: they differ from those here. Raises ConfigError: another model."""
        marks = self._first if marks is None else marks
        if marks == self._marks():
            return False
        if len(marks) != len(self._all):
            raise ConfigError(
                "model", f"{len(self._all)} parameters", f"the state to load is of {len(marks)}", "Load one of the same model."
            )
        found = [(one, int(mark)) for one, mark in zip(self._all, marks, strict=True)]
        for one, mark in found:
            one.requires_grad_(bool(mark & 1))
        before, self._placed = self._placed, {id(one) for one, mark in found if mark & PLACED}
        if self._placed == before:
            self._flags = [one.requires_grad for one, _ in found]
        else:
            self._find()
        never = {id(one) for one, mark in found if mark & NEVER}
        self.stepped = ALL & ~sum(1 << number for number, one in enumerate(self.parameters) if id(one) in never)
        return True
