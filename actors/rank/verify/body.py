"""What a loop body may not do: change what is tracked. That happens in ``step.commit()``, once on every rank, whoever is lost meanwhile.

A body that does it all the same looks like broken hardware, as ranks come to differ. So it is found here first, by three nets:

- what only ``commit`` may call (the optimizer's step, the scheduler's, the scaler's) is refused at the user's very line;
- autograd counts how often a tensor was written, and no flipped bit is counted: a parameter with another count was written by a program;
- what bypasses that count (``.data``) shows in digests of a few tensors, taken when a body begins and when it ends, now and then. One rank
  alone may have been hit by a flipped bit. Two at once, or one twice in a row, are a program.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors.rank.membership.process_group import GroupBroken
from actors.rank.step.update import Update
from actors.rank.verify.replicas import REFRESH_STEPS, digest
from fleet.errors import LoopError

COUNTED = 32
"""Parameters whose count of writes is looked at in a step: more take turns, as a look at each takes a tenth of a microsecond."""

SAMPLE_BYTES, SAMPLED = 16 << 20, 4
"""In the first bodies of a process so much is digested; then, now and then, so many parameters with what the optimizer holds of them."""

OURS = str(Path(__file__).parents[2])
ONLY_COMMIT = "step.commit() does that, once on every rank. Remove the line."
BY_PLATEAU = "step.commit() does that, once on every rank. Give the figure to step.plateau(value), before step.commit()."
CHANGES = "What is tracked changes in step.commit() only. Give this change to step.on_commit(fn), or do not track what it changes."
GROUPS = "A rank that joins later would lack the group. Make all groups before run.track, and freeze what is not to train yet."
CLEARED = "Gradients are collected when the loop asks for its next batch, and Fleet clears them then. Remove the line."

T = TypeVar("T")
_version = attrgetter("_version")


class Body:
    """Watches one rank's loop body.

    Args:
        modules, update: what is tracked. The optimizers, schedulers and scaler refuse from now on to be stepped in a loop body.
        samples: also take digests, and tell the other ranks of a change (:meth:`said`, :meth:`compare`).

    Attributes:
        apart: by ``id``, parameters that are here only while they are computed with: of these no digests are taken.
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
        """The user's code runs from here on; the state of ``step`` is in place."""
        if not self._inside:
            self._inside, self._step, self._gradient = True, step, None
            self._begun += 1
            self._count()
            self._digests = self._sample() if self._due(step) else {}

    def leave(self) -> None:
        """Fleet goes on; whatever it does is right."""
        self._inside = False

    def check(self) -> None:
        """The body is over: raises LoopError when a parameter was written in it."""
        self._inside, self._changed = False, ""
        versions = self._writes()
        if versions != self._versions:
            first = next(index for index, now, then in zip(self._counted, versions, self._versions, strict=True) if now != then)
            raise LoopError(f"step {self._step}: the loop body wrote to {self._names[first]}. {CHANGES}")
        if self._digests:
            self._changed = self._differing(self._digests)

    def during(self, fn: Callable[[], T]) -> T:
        """What ``fn`` gives. It runs on this rank alone, so it may write to what is tracked only if it puts it back. Raises LoopError."""
        inside, self._inside = self._inside, True
        before = self._alone = self._sample() if self.width else {}
        try:
            found = fn()
        finally:
            self._alone = None
        if changed := self._differing(before):
            raise LoopError(
                f"what was given to run.evaluate or run.once changed {changed}, on one rank alone. Put it back before it returns."
            )
        self._inside = inside
        self._count()
        return found

    def changed(self) -> str:
        """What of the state is not as it was committed, as far as it can be seen now; empty: nothing. From any thread.

        An evaluation may have other weights in place until it returns.
        """
        if (before := self._alone) is not None:
            return self._differing(before) if before else "what an evaluation does is not looked at, with verify.replicas = 0"
        if not self._inside:
            return ""
        counts = zip(self._counted, self._writes(), self._versions, strict=True)
        written = [at for at, now, then in counts if now != then and id(self._parameters[at]) not in self.apart]
        return self._names[written[0]] if written else self._differing(self._digests)

    # ---- what ranks tell each other ------------------------------------------------------------------------------------------------------

    def said(self) -> list[float]:
        """The number to send with the gradients: whether this rank's body changed something."""
        return [float(bool(self._changed))] * self.width

    def compare(self, said: Sequence[float], generation: int) -> None:
        """All ranks' numbers. Raises LoopError where several have changed the state in one body, or the only one has twice in a row."""
        changed = sum(bool(one) for one in said)
        again = bool(self._changed) and self._before
        if self._digests:
            self._before = bool(self._changed)
        if changed < 2 and not (again and len(said) == 1):
            return
        if not self._changed:
            raise GroupBroken("the loop body of other ranks changed what is tracked", generation)
        raise LoopError(f"step {self._step}: the loop body changed {self._changed}, on {changed} of {len(said)} ranks. {CHANGES}")

    # ---- nets ----------------------------------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Which parameters were written how often, in turns when there are many."""
        size = len(self._parameters)
        first = self._begun * COUNTED % max(size, 1) if size > COUNTED else 0
        self._counted = range(first, min(first + COUNTED, size))
        self._versions = self._writes()

    def _writes(self) -> list[int]:
        return list(map(_version, self._parameters[self._counted.start : self._counted.stop]))

    def _due(self, step: int) -> bool:
        return bool(self.width) and (self._begun <= 2 or step % REFRESH_STEPS < 2)

    def _sample(self) -> dict[tuple[int, str], int]:
        """Digests by number of the parameter and name of what the optimizer holds of it, of others each time when there are many."""
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
        """A parameter, under the empty name, and the tensors that the optimizer holds of it."""
        parameter = self._parameters[index]
        state: Mapping[str, Any] = next((found for one in self._optimizers if (found := one.state.get(parameter))), {})
        own = {} if id(parameter) in self.apart else {"": parameter}
        return own | {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def _differing(self, before: Mapping[tuple[int, str], int]) -> str:
        """The first of the tensors that is no longer what it was; empty when all are."""
        for (index, key), then in before.items():
            now = self._held(index).get(key)
            if now is None or _digest(now) != then:
                return f"the optimizer's {key} of {self._names[index]}" if key else self._names[index]
        return ""

    # ---- what is refused -----------------------------------------------------------------------------------------------------------------

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
        raise LoopError(f"optimizer.add_param_group() was called behind run.steps, at {users_line()}: {GROUPS}")


def users_line() -> str:
    """``train.py:41``: where the user's code is that has led here."""
    libraries = [str(Path(file).parent) for name in ("torch", "ray") if (file := getattr(sys.modules.get(name), "__file__", None))]
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((OURS, *libraries)):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _digest(tensor: torch.Tensor) -> int:
    return digest([tensor], 0, min(tensor.numel() * tensor.element_size(), SAMPLE_BYTES))


def _before(tracked: Any, method: str, then: Callable[[], None]) -> None:
    """``then()`` is called before each ``tracked.method(...)``. Of an optimizer the state_dict does not hold such an attribute."""
    right = getattr(tracked, method)

    @functools.wraps(right)
    def called(*args: Any, **kwargs: Any) -> Any:
        then()
        return right(*args, **kwargs)

    setattr(tracked, method, called)


def _override(tracked: Any, what: str, methods: Sequence[str], refuse: Callable[[str], None]) -> None:
    """``refuse("scheduler.step()")`` comes before each call. By a class of its own, as a scheduler's state_dict holds its attributes."""
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
