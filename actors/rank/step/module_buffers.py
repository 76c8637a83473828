"""Buffers of modules that a forward changes, such as BatchNorm's statistics: their committed values, and their new values after a step.

A buffer has its committed value when a shard begins. The changes of all shards are summed with the gradients, in the same order. Their mean
is added to the committed value, so such models train bit-identically, too. With one shard there is no mean: a buffer keeps the value of its
forward, since adding a difference again may round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from actors.rank.step.flats import collect
from fleet.errors import ConfigError

AVERAGED_BUFFER_LIMIT = 1 << 16
"""Elements; floating-point buffers up to this size are averaged over shards. Larger ones (masks, tables) have to stay constant."""


@dataclass
class _Buffer:
    """One buffer of a module; looked up again each time, as a forward may replace it."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        found = self.module._buffers[self.key]
        assert found is not None
        return found


def _named_buffers(modules: Mapping[str, nn.Module]) -> Iterator[_Buffer]:
    seen: set[int] = set()
    for root, module in modules.items():
        for path, child in module.named_modules():
            for key, tensor in child._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Buffer(".".join(filter(None, (root, path, key))), child, key)


class ModuleBuffers:
    """The buffers of ``modules``, which are given by name, in a run with so many ``shards``.

    For each step: :meth:`begin_step`, then :meth:`restore` before each shard and :meth:`collect` after it, then :meth:`commit`.

    Attributes:
        followed: ranks without a shard take steps, too: no forward may begin to change an integer, see :attr:`wants`.
    """

    def __init__(self, modules: Mapping[str, nn.Module], shards: int) -> None:
        self._modules, self._shards, self._counts, self.followed, self._looked = modules, shards, "", False, False
        self._committed: list[torch.Tensor] = []  # of the buffers that a forward changes; none between steps
        self.find()

    def find(self) -> None:
        """Find the buffers of the modules as they are now."""
        found = list(_named_buffers(self._modules))
        floating = [buffer for buffer in found if buffer.tensor.is_floating_point()]
        # Batch norm's kernels change its statistics without counting up their version, so no check would see it: always averaged.
        averaged = [isinstance(b.module, nn.modules.batchnorm._NormBase) or b.tensor.numel() <= AVERAGED_BUFFER_LIMIT for b in floating]
        self._averaged = [buffer for buffer, yes in zip(floating, averaged, strict=True) if yes]
        self._constant = [buffer for buffer, yes in zip(floating, averaged, strict=True) if not yes]
        self._counted = [buffer for buffer in found if not buffer.tensor.is_floating_point()]

    @property
    def averaged(self) -> list[torch.Tensor]:
        """The buffers whose changes are averaged over shards."""
        return [buffer.tensor for buffer in self._averaged]

    @property
    def constant(self) -> bool:
        """True when no forward may change a buffer. Then the state is as committed between commits."""
        return not self._averaged and not self._counted

    @property
    def wants(self) -> str:
        """Why a rank that computes no shard of a step does not know all buffers after it; empty where it does."""
        if self._shards == 1 and self._averaged:
            return f"with one shard, {self._averaged[0].name} is known to the rank alone that computes it"
        return f"a forward changes {self._counts}, an integer, which a rank without a shard does not know" if self._counts else ""

    def begin_step(self) -> None:
        """A step begins: the buffers hold their committed values."""
        self._versions = [(id(buffer.tensor), buffer.tensor._version) for buffer in self._constant]
        self._first_count: list[torch.Tensor] = []  # integer buffers after the first shard
        self._left: list[torch.Tensor] | None = None  # averaged buffers after the only shard
        self._committed = [buffer.tensor.clone() for buffer in (*self._averaged, *self._counted)]

    def as_committed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Within a step, the buffers that a forward changes, and what each was when the step began. From any thread."""
        committed = self._committed
        return list(zip([buffer.tensor for buffer in (*self._averaged, *self._counted)], committed, strict=True)) if committed else []

    def restore(self) -> None:
        """Give the buffers their committed values, if a step has begun."""
        with torch.no_grad():
            for tensor, value in self.as_committed():
                tensor.copy_(value)

    def check(self) -> None:
        """Raises ConfigError: a forward has changed a buffer that is too large."""
        for buffer, version in zip(self._constant, self._versions, strict=True):
            if (id(buffer.tensor), buffer.tensor._version) != version:
                reason = f"the forward changed this buffer; only those of up to {AVERAGED_BUFFER_LIMIT} elements are averaged over shards"
                raise ConfigError("model", buffer.name, reason, "Make it a parameter, or keep it out of the forward.")

    @torch.no_grad()
    def collect(self, into: Sequence[torch.Tensor], add: bool, weight: float) -> None:
        """Copy or add the changes of a shard's forward, times ``weight``, to their places."""
        # An equal value is no change, also where the difference is not zero: infinities in a mask.
        pairs = zip(self.averaged, self._committed[: len(self._averaged)], strict=True)
        changes: list[torch.Tensor | None] = [torch.where(now == was, torch.zeros_like(was), now - was) for now, was in pairs]
        if weight != 1.0:  # a shard of weight 0 changes nothing, also where its forward has left NaN
            changes = [change * weight if change is not None and weight else None for change in changes]
        collect(changes, into, add)
        if not self._first_count:
            self._first_count = [buffer.tensor.clone() for buffer in self._counted]
            if not self._counts and (self.followed or not self._looked):  # a comparison waits for the device
                self._note_changed()
        if self._shards == 1 and weight:
            self._left = [tensor.clone() for tensor in self.averaged]

    def _note_changed(self) -> None:
        """Look whether a forward changes integer buffers."""
        before = zip(self._counted, self._committed[len(self._averaged) :], self._first_count, strict=True)
        changed = next((buffer.name for buffer, was, now in before if not torch.equal(was, now)), "")
        if changed and self.followed:
            reason = "a forward changes this integer, and did not in the rehearsal: a spare of a sharded run does not know it"
            raise ConfigError("model", changed, reason, "Start the run with --spares 0, or let each forward change it.")
        self._counts, self._looked = changed, True

    @torch.no_grad()
    def commit(self, changes: Sequence[torch.Tensor]) -> None:
        """Give each buffer its new value: the committed one plus the mean of the shards' ``changes``.

        An integer buffer gets its value after the first shard, and with one shard so does each buffer. On a rank that has computed no
        shard it stays as it is: see :attr:`wants`.
        """
        for tensor, value in zip(self.averaged, changes if self._left is None else self._left, strict=True):
            tensor.add_(value) if self._left is None else tensor.copy_(value)
        for buffer, value in zip(self._counted, self._first_count, strict=bool(self._counts)):
            buffer.tensor.copy_(value)

    def end_step(self) -> None:
        """The buffers' present values are the committed ones from now on."""
        self._committed = []
