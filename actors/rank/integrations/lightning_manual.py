"""Manual optimization in the adapter of Lightning's Trainer: calls of ``training_step`` to several optimizers become steps of Fleet.

A batch has *turns*: a turn is one or several backwards, and the optimizer steps after them. Each turn is a step of Fleet, with the same
samples and the same random numbers. In it each shard runs ``training_step`` from its top, with the present weights. Calls of earlier turns
have no effect. The turn's last ``optimizer.step()`` leaves ``training_step``; in the last turn ``training_step`` runs to its end.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.trainer import call

from actors.rank.data.sampling import generators_kept
from actors.rank.integrations.lightning_refused import by_hand_refused as refused


class TurnOver(BaseException):
    """The present turn is done: leaves ``training_step``. ``except Exception`` in a module does not catch it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The optimizer steps of ``training_step`` for one batch.

    Attributes:
        optimizers: the number of the optimizer of each step, in order. ``norms``: the norm to which each step clips its gradient.
        ends: by turn, how many of these steps are done at its end.
        owners: by schedule, the number of its optimizer.
    """

    optimizers: tuple[int, ...]
    norms: tuple[float | None, ...]
    ends: tuple[int, ...]
    owners: tuple[int, ...]

    def begin(self, turn: int) -> int:
        """How many of the steps are done when ``turn`` begins."""
        return (0, *self.ends)[turn]

    def due(self, turn: int, noted: list[tuple[int, int]]) -> list[int]:
        """The schedules that the commit of ``turn`` steps. ``noted``: (number of a schedule, how many steps were done before)."""
        begin, end, last = self.begin(turn), self.ends[turn], turn + 1 == len(self.ends)
        due = [(number, at) for number, at in noted if begin <= at < end + last]
        if any(self.owners[number] in self.optimizers[at:end] for number, at in due):
            raise refused("schedule order")
        return [number for number, _ in due]


class Hand(ABC):
    """Handles the calls of a running ``training_step`` with manual optimization.

    Attributes:
        done: how many steps of optimizers were made.
        noted: see :meth:`Turns.due`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.module = trainer, trainer.lightning_module
        self.done, self.noted = 0, list[tuple[int, int]]()
        self._clipped: dict[int, float] = {}

    def backward(self, loss: torch.Tensor, *given: Any, **named: Any) -> None:
        """Replaces ``manual_backward``."""
        retained = bool(named.pop("retain_graph", False))
        if given or any(value not in (None, False) for value in named.values()):
            raise refused("backward", ", ".join(named) or "gradient")
        self.learns(loss, retained)

    def clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Replaces ``clip_gradients``."""
        if gradient_clip_algorithm != "norm":
            raise refused("clip_gradients", "value")
        if clip_val > 0:
            self._clipped[self.number(optimizer)] = float(clip_val)

    def step(self, optimizer: Any, closure: Any, **named: Any) -> None:
        """Replaces ``optimizer.step()``."""
        if closure is not do_nothing_closure or named:
            raise refused("optimizer.step", ", ".join(named) or "closure")
        number = self.number(optimizer)
        self.done += 1
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += 1
        self.steps(number, self._clipped.pop(number, None))

    def number(self, optimizer: Any) -> int:
        """The number of an optimizer."""
        raw = getattr(optimizer, "_optimizer", optimizer)
        found = next((number for number, one in enumerate(self.trainer.optimizers) if one is raw), None)
        if found is None:
            raise refused("optimizers")
        return found

    @abstractmethod
    def learns(self, loss: torch.Tensor, retained: bool) -> None:
        """A backward of ``loss``, whose graph is used again if it is ``retained``."""

    @abstractmethod
    def steps(self, number: int, norm: float | None) -> None:
        """Optimizer ``number`` steps, with a gradient that is clipped to ``norm``. ``done`` counts this step already."""

    @abstractmethod
    def returned(self) -> None:
        """``training_step`` has returned."""


class OneTurn(Hand):
    """One turn of one shard. ``backward`` gets the turn's losses."""

    def __init__(self, trainer: Any, turns: Turns, turn: int, backward: Callable[[torch.Tensor], object]) -> None:
        super().__init__(trainer)
        self._turns, self._begin, self._end, self._backward = turns, turns.begin(turn), turns.ends[turn], backward
        self._buffers = [(one, one.clone()) for one in self.module.buffers()] if self._begin else []
        self._held: list[torch.Tensor] = []
        self._learnt = False
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []

    def learns(self, loss: torch.Tensor, retained: bool) -> None:
        """See :class:`Hand`. A loss whose graph is used again waits for the others of the turn."""
        if not self._begin <= self.done < self._end:
            return
        if self.done > self._begin:
            raise refused("others")
        self._learnt = True
        if retained or self._held:
            self._held.append(loss)
        else:
            self._backward(loss)

    def steps(self, number: int, norm: float | None) -> None:
        """See :class:`Hand`."""
        at = self.done - 1
        if self._turns.optimizers[at : at + 1] != (number,) or self._turns.norms[at] != norm:
            raise refused("others")
        if self.done == self._begin:  # buffers changed by earlier turns' forwards count in those turns
            put_back(self._buffers)
            self.trainer.fit_loop.epoch_loop._results.clear()
        if self.done == self._end:
            self._ends()

    def _ends(self) -> None:
        if not self._learnt:
            raise refused("others")
        if self._held:
            self._backward(sum(self._held[1:], self._held[0]))
        if self._end < len(self._turns.optimizers):
            raise TurnOver
        self._gradients = [(one, one.grad) for one in self.module.parameters()]
        for one, _ in self._gradients:  # training_step may clear gradients from now on
            one.grad = None

    def returned(self) -> None:
        """See :class:`Hand`."""
        if self.done != len(self._turns.optimizers):
            raise refused("others")
        for one, gradient in self._gradients:
            one.grad = gradient


class ByHand:
    """Manual optimization in one call of ``fit()``.

    Args:
        batch: a micro-batch, for ranks that have none.

    Attributes:
        turns: of each batch.
        due: the numbers of schedules that the current commit steps.
    """

    def __init__(self, trainer: Any, turns: Turns, batch: Any) -> None:
        self._trainer, self.turns, self._batch = trainer, turns, batch
        self._noted: tuple[int, list[tuple[int, int]]] = (-1, [])
        self.due: list[int] = []

    def taken(self, number: int) -> tuple[int, ...]:
        """The numbers of the optimizers of step ``number``."""
        turn = number % len(self.turns.ends)
        return self.turns.optimizers[self.turns.begin(turn) : self.turns.ends[turn]]

    def run(self, number: int, batch: Any, batch_idx: int, backward: Callable[[torch.Tensor], object]) -> None:
        """One shard of step ``number``."""
        turn = number % len(self.turns.ends)
        hand = OneTurn(self._trainer, self.turns, turn, backward)
        run_by_hand(self._trainer, hand, batch, batch_idx, number // len(self.turns.ends) * self.turns.ends[-1])
        if self._noted[0] == number and self._noted[1] != hand.noted:
            raise refused("others")
        self._noted = number, hand.noted
        self.due = self.turns.due(turn, hand.noted)

    def follow(self, number: int, batch_idx: int) -> None:
        """On a rank without a shard of step ``number``: find the same schedules."""
        if not self._trainer.lr_scheduler_configs or self._noted[0] == number:
            return
        with as_before(self._trainer.lightning_module):
            self.run(number, copy.deepcopy(self._batch), batch_idx, lambda loss: None)
        self._trainer.fit_loop.epoch_loop._results.clear()


def run_by_hand(trainer: Any, hand: Hand, batch: Any, batch_idx: int, stepped: int = 0) -> None:
    """Run ``training_step`` with ``hand``, which handles its calls. ``stepped``: how often optimizers stepped before the batch.

    It restores which parameters require a gradient.
    """
    module, strategy, plugin, loop = trainer.lightning_module, trainer.strategy, trainer.precision_plugin, trainer.fit_loop.epoch_loop
    flags = [(one, one.requires_grad) for one in module.parameters()]
    progress, named = loop.manual_optimization.optim_step_progress.total, module._current_fx_name
    before, progress.completed = progress.completed, stepped
    loop.batch_progress.is_last_batch = batch_idx + 1 == trainer.num_training_batches
    strategy.hand, plugin.clip_gradients = hand, hand.clip
    try:
        given = loop._build_kwargs(OrderedDict(), batch, batch_idx)
        call._call_strategy_hook(trainer, "training_step", *given.values())
        hand.returned()
    except TurnOver:
        module._current_fx_name = named
    finally:
        strategy.hand, progress.completed = None, before
        del plugin.clip_gradients
        for one, flag in flags:
            one.requires_grad_(flag)


@torch.no_grad()
def put_back(kept: list[Any]) -> None:
    """For each pair, copy the second tensor's values into the first."""
    for one, value in kept:
        one.copy_(value)


@contextmanager
def as_before(module: Any) -> Iterator[None]:
    """Context after which buffers and generators are as they were before."""
    buffers = [(one, one.clone()) for one in module.buffers()]
    with generators_kept():
        try:
            yield
        finally:
            put_back(buffers)


@contextmanager
def stepped_by_commits(trainer: Any) -> Iterator[list[Callable[[], None]]]:
    """Context in which ``step()`` of a schedule is noted in ``training_step``, and refused elsewhere. Gives functions that step the
    schedules.

    It derives a class for each schedule, as a schedule's state_dict contains its attributes.
    """
    schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
    kinds = [type(each) for each in schedules]

    def noting(number: int) -> Callable[..., None]:
        def step(self: Any, *given: Any, **named: Any) -> None:
            hand = trainer.strategy.hand
            if hand is None or given or named:
                raise refused("schedule", "arguments" if hand is not None else "outside of training_step")
            hand.noted.append((number, hand.done))

        return step

    for number, (each, kind) in enumerate(zip(schedules, kinds, strict=True)):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "step": noting(number)}
        each.__class__ = type(kind.__name__, (kind,), names)
    try:
        yield [partial(kind.step, each) for each, kind in zip(schedules, kinds, strict=True)]
    finally:
        for each, kind in zip(schedules, kinds, strict=True):
            each.__class__ = kind
