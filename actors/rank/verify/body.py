"""A loop body may not change tracked objects. ``step.commit()`` changes them, once on each rank, also when a rank is lost meanwhile.

If a body changes them, ranks differ, as with broken hardware. So three checks look for it first:

- calls that only ``commit`` may make (the step of the optimizer, scheduler or scaler) raise at the user's line;
- autograd counts writes to a tensor, and a flipped bit does not change the count: so if it changed, a program wrote to the parameter;
- writes without a count (``.data``) show in digests of a few tensors, taken in some steps when a body begins and ends. On one rank alone a
  flipped bit may be the cause. On two ranks at once, or twice in a row in a run of one rank, it is a program.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors.rank.membership.process_group import GroupBroken
from actors.rank.mesh.parts import local
from actors.rank.step.update import Update
from actors.rank.verify.replicas import REFRESH_STEPS, digest
from fleet.errors import LoopError

COUNTED = 32
"""Parameters whose count of writes is checked in a step. More take turns, as each check takes a tenth of a microsecond."""

SAMPLE_BYTES, SAMPLED = 16 << 20, 4
"""The first bodies of a process digest at most so many bytes. Later, in some steps, so many parameters with their optimizer state."""

OURS = str(Path(__file__).parents[2])
ONLY_COMMIT = "step.commit() does that, once on every rank. Remove the line."
BY_PLATEAU = "step.commit() does that, once on every rank. Give the figure to step.plateau(value), before step.commit()."
CHANGES = "Tracked objects change in step.commit() only. Give this change to step.on_commit(fn), or do not track the object it changes."
GROUPS = "A rank that joins later would lack the group. Make all groups before run.track, and freeze what is not to train yet."
CLEARED = "Gradients are collected when the loop asks for its next batch, and Fleet clears them then. Remove the line."

T = TypeVar("T")


def _version(tensor: torch.Tensor) -> int:
    return local(tensor)._version


class Body:
    """Watches one rank's loop body.

    Args:
        modules, update: the tracked objects. From now on a step of the optimizers, schedulers or scaler in a loop body raises.
        samples: also take digests, and report a change to the other ranks (:meth:`said`, :meth:`compare`).

    Attributes:
        apart: ids of parameters that this rank has only while it computes with them: they are not digested.
    """

    apart: frozenset[int] = frozenset()

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        update: Update,
        samples: bool,
    ) -> None:
        named = {f"{root}.{name}": one for root, module in modules.items() for name, one in module.named_parameters()}
        self._names, self._parameters = list(named), list(named.values())
        self._optimizers, self._inside, self._step = update.optimizers, False, -1
        self.width = 1 if samples else 0
        self._begun = self._first = 0
        self._counted = range(0)
        self._versions: list[int] = []
        self._digests: dict[tuple[int, str], int] = {}
        self._changed, self._before = "", False
        self._gradient: torch.nn.Parameter | None = None
        self._alone: dict[tuple[int, str], int] | None = None
        for optimizer in update.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._refuse("optimizer.step()"))
            _before(optimizer, "zero_grad", self._on_zero_grad)
            _before(optimizer, "add_param_group", self._on_add_param_group)
        for scheduler in update.schedulers:
            _override(scheduler, "scheduler", ["step"], self._refuse)
        for plateau in update.plateaus:
            _override(plateau, "scheduler", ["step"], functools.partial(self._refuse, way_out=BY_PLATEAU))
        if update.scaler is not None:
            _override(update.scaler, "scaler", ["step", "update", "unscale_"], self._refuse)

    # ---- a body begins, and ends ---------------------------------------------------------------------------------------------------------

    def enter(self, step: int) -> None:
        """The user's code runs from now on; the state of ``step`` is in place."""
        if not self._inside:
            self._inside, self._step, self._gradient = True, step, None
            self._begun += 1
            self._count()
            self._digests = self._sample() if self._due(step) else {}

    def leave(self) -> None:
        """Fleet's code runs from now on, which may change the state."""
        self._inside = False

    def check(self) -> None:
        """The body is over. Raises LoopError when it wrote to a parameter."""
        self._inside, self._changed = False, ""
        versions = self._writes()
        if versions != self._versions:
            first = next(index for index, now, then in zip(self._counted, versions, self._versions, strict=True) if now != then)
            raise LoopError(f"step {self._step}: the loop body wrote to {self._names[first]}. {CHANGES}")
        if self._digests:
            self._changed = self._differing(self._digests)

    def during(self, fn: Callable[[], T]) -> T:
        """Run ``fn`` on this rank alone, and return its result. It has to undo its changes of tracked objects. Raises LoopError."""
        inside, self._inside = self._inside, True
        before = self._alone = self._sample() if self.width else {}
        try:
            found = fn()
        finally:
            self._alone = None
        if changed := self._differing(before):
            raise LoopError(
                f"the function of run.evaluate or run.once changed {changed}, on one rank alone. Put it back before it returns."
            )
        self._inside = inside
        self._count()
        return found

    def changed(self) -> str:
        """The name of a tensor that is found changed since the commit; empty: none is found. From any thread.

        An evaluation may have other weights in place until it returns.
        """
        if (before := self._alone) is not None:
            return self._differing(before) if before else "tensors during an evaluation, which verify.replicas = 0 does not check"
        if not self._inside:
            return ""
        counts = zip(self._counted, self._writes(), self._versions, strict=True)
        written = [at for at, now, then in counts if now != then and id(self._parameters[at]) not in self.apart]
        return self._names[written[0]] if written else self._differing(self._digests)

    # ---- comparison between ranks --------------------------------------------------------------------------------------------------------

    def said(self) -> list[float]:
        """The number to send with the gradients: whether this rank's body changed a tensor."""
        return [float(bool(self._changed))] * self.width

    def compare(self, said: Sequence[float], generation: int) -> None:
        """Compare all ranks' numbers. Raises LoopError where several ranks changed the state in one body, or the only rank did twice in a
        row."""
        changed = sum(bool(one) for one in said)
        again = bool(self._changed) and self._before
        if self._digests:
            self._before = bool(self._changed)
        if changed < 2 and not (again and len(said) == 1):
            return
        if not self._changed:
            raise GroupBroken("the loop body of other ranks changed what is tracked", generation)
        raise LoopError(f"step {self._step}: the loop body changed {self._changed}, on {changed} of {len(said)} ranks. {CHANGES}")

    # ---- counts and digests --------------------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Keep the count of writes of some parameters, in turns when there are many."""
        size = len(self._parameters)
        first = self._begun * COUNTED % max(size, 1) if size > COUNTED else 0
        self._counted = range(first, min(first + COUNTED, size))
        self._versions = self._writes()

    def _writes(self) -> list[int]:
        return list(map(_version, self._parameters[self._counted.start : self._counted.stop]))

    def _due(self, step: int) -> bool:
        return bool(self.width) and (self._begun <= 2 or step % REFRESH_STEPS < 2)

    def _sample(self) -> dict[tuple[int, str], int]:
        """Digests by number of the parameter and name of its optimizer state; of other parameters each time when there are many."""
        size = len(self._parameters)
        found: dict[tuple[int, str], int] = {}
        room = SAMPLE_BYTES
        for index in range(self._first, self._first + (size if self._begun <= 2 else min(SAMPLED, size))):
            if room <= 0:
                break
            self._first = (index + 1) % size
            for key, tensor in self._held(index % size).items():
                found[index % size, key] = _digest(tensor)
                room -= tensor.numel() * tensor.element_size()
        return found

    def _held(self, index: int) -> dict[str, torch.Tensor]:
        """A parameter, under the empty name, and the tensors of its optimizer state."""
        parameter = self._parameters[index]
        state: Mapping[str, Any] = next((found for one in self._optimizers if (found := one.state.get(parameter))), {})
        own = {} if id(parameter) in self.apart else {"": parameter}
        found = own | {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        return {key: value for key, value in found.items() if not value.is_meta}

    def _differing(self, before: Mapping[tuple[int, str], int]) -> str:
        """The name of the first tensor that has changed; empty if none has."""
        for (index, key), then in before.items():
            now = self._held(index).get(key)
            if now is None or _digest(now) != then:
                return f"the optimizer's {key} of {self._names[index]}" if key else self._names[index]
        return ""

    # ---- refused calls -------------------------------------------------------------------------------------------------------------------

    def _refuse(self, call: str, way_out: str = ONLY_COMMIT) -> None:
        if self._inside:
            raise LoopError(f"{call} was called in the loop body, at {users_line()}: {way_out}")

    def computed(self) -> None:
        """A backward has left gradients, which are collected when the body asks for its next batch."""
        if self._gradient is None or self._gradient.grad is None:
            self._gradient = next((one for one in self._parameters if one.grad is not None), None)

    def collected(self) -> None:
        """The body asks for its next batch. Raises LoopError when its gradients are gone."""
        gradient, self._gradient = self._gradient, None
        if gradient is not None and gradient.grad is None:
            raise LoopError(f"step {self._step}: zero_grad() was called after step.backward(loss). {CLEARED}")

    def _on_zero_grad(self) -> None:
        if self._inside and self._gradient is not None:
            raise LoopError(f"optimizer.zero_grad() was called after step.backward(loss), at {users_line()}. {CLEARED}")

    def _on_add_param_group(self) -> None:
        raise LoopError(f"optimizer.add_param_group() was called after run.steps, at {users_line()}: {GROUPS}")


def users_line() -> str:
    """The line of the user's code that led to this call, such as ``train.py:41``."""
    libraries = [str(Path(file).parent) for name in ("torch", "ray") if (file := getattr(sys.modules.get(name), "__file__", None))]
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((OURS, *libraries)):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _digest(tensor: torch.Tensor) -> int:
    mine = local(tensor)
    return digest([mine], 0, min(mine.numel() * mine.element_size(), SAMPLE_BYTES))


def _before(tracked: Any, method: str, then: Callable[[], None]) -> None:
    """Call ``then()`` before each ``tracked.method(...)``. An optimizer's state_dict does not contain such an attribute."""
    right = getattr(tracked, method)

    @functools.wraps(right)
    def called(*args: Any, **kwargs: Any) -> Any:
        then()
        return right(*args, **kwargs)

    setattr(tracked, method, called)


def _override(tracked: Any, what: str, methods: Sequence[str], refuse: Callable[[str], None]) -> None:
    """Call ``refuse("scheduler.step()")`` before each call. It derives a class, as a scheduler's state_dict contains its attributes."""
    kind = type(tracked)

    def guarded(method: str) -> Callable[..., Any]:
        right = getattr(kind, method)

        @functools.wraps(right)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            refuse(f"{what}.{method}()")
            return right(self, *args, **kwargs)

        return called

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    tracked.__class__ = type(kind.__name__, (kind,), names | {method: guarded(method) for method in methods})
