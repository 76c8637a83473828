"""The values of a trial, as digests in order: hooks of modules and tensors take them, and change no result."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from actors.rank.data.fingerprint import digest_of
from actors.rank.mesh.parts import local
from fleet.ledger.sameness import BATCH, IN_GRADIENT, INPUT, LOOP, OP, OUT_GRADIENT, OUTPUT, TrialMark

CHANCE = torch.Tag.nondeterministic_seeded
UNWRITTEN = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
"""Operations that give memory without written values."""


class Book:
    """The marks of one trial, and the script's present position.

    Args:
        inside: the module whose operations are marked, too, also those of the backward; empty: none.
        timed: make no marks, but measure the forwards of each module.
    """

    def __init__(self, inside: str = "", timed: bool = False) -> None:
        self.marks: list[TrialMark] = []
        self.step = self.shard = -1
        self.path: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside, self.timed = inside, timed
        self._operations: TorchDispatchMode | None = None
        self._begun_s: list[float] = []

    @property
    def within(self) -> str:
        """The module whose forward runs."""
        return self.path[-1] if self.path else LOOP

    def add(self, kind: str, where: str, digest: str, **more: Any) -> None:
        """Add a mark."""
        if not self.timed:
            self.marks.append(TrialMark(kind, where, digest, self.step, self.shard, self.within, **more))

    def value(self, kind: str, where: str, value: Any) -> None:
        """Mark a value."""
        if not self.timed:
            self.add(kind, where, digest(value))

    def batch(self, dataset: Any, batch: Any) -> None:
        """Mark a batch for the loop body."""
        if not self.timed:
            self.add(BATCH, type(dataset).__qualname__, digest_of(batch))

    def backward(self) -> AbstractContextManager[Any]:
        """Context of a backward."""
        return Operations(self) if self._inside and not self.timed else nullcontext()

    # ---- modules -------------------------------------------------------------------------------------------------------------------------

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Mark the forwards of these modules, and of the modules in them, from now on."""
        seen: set[int] = set()
        for root, module in modules.items():
            for path, inner in module.named_modules():
                if id(inner) not in seen:
                    seen.add(id(inner))
                    self._hook(".".join(filter(None, (root, path))), inner)

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(name, (args, kwargs))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._leave(name, output)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _enter(self, name: str, given: Any) -> None:
        if self.timed:
            self._begun_s.append(time.perf_counter())
        elif self.shard >= 0:
            self.value(INPUT, name, given)
            self._gradients(IN_GRADIENT, name, given)
        self.path.append(name)
        if name == self._inside and self._operations is None and self.shard >= 0 and not self.timed:
            self._operations = Operations(self)
            self._operations.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, name: str, output: Any) -> None:
        if name == self._inside and self._operations is not None:
            self._operations.__exit__(None, None, None)
            self._operations = None
        while self.path and self.path.pop() != name:  # also removes forwards that raised, which do not come here
            continue
        if self.timed and self._begun_s:
            self.seconds[name] += time.perf_counter() - self._begun_s.pop()
        elif self.shard >= 0:
            self.value(OUTPUT, name, output)
            self._gradients(OUT_GRADIENT, name, output)

    def _gradients(self, kind: str, name: str, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self.value, kind, name))


class Operations(TorchDispatchMode):
    """Context in which torch's operations are marked, with their inputs and outputs."""

    def __init__(self, book: Book) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = book

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``TorchDispatchMode``."""
        given = digest((args, kwargs or {}))
        found = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]  # without the overload
        if name in UNWRITTEN:
            found.zero_()  # so an operation that writes there gets the same memory each time
        else:
            self._book.add(OP, name, digest(found), given=given, chance=CHANCE in func.tags)
        return found


def digest(value: Any) -> str:
    """The digest of all tensors in ``value``, and of its plain numbers and texts."""
    found = hashlib.blake2b(digest_size=16)
    for one in _leaves(value):
        if isinstance(one, torch.Tensor):
            found.update(f"{one.dtype} {list(one.shape)}".encode())
            found.update(_bytes(one))
        else:
            found.update(repr(one).encode())
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = local(tensor).detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex() or tensor.is_conj():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())  # a tensor of one element may have any stride
    return flat.view(torch.uint8).numpy().tobytes()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples, mappings and dataclasses."""
    return (one for one in _leaves(value) if isinstance(one, torch.Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Tensor, bool, int, float, str, bytes)):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
