"""Optimization by hand in the adapter of Lightning's Trainer: what ``training_step`` does with several optimizers becomes steps of Fleet.

A batch has *turns*: a turn is one backward or several, and the steps of optimizers behind them. Each turn is a step of Fleet, of the same
samples and the same random numbers. In it each shard runs ``training_step`` from its top, with the weights of now. Calls of earlier turns
do nothing. The turn's last ``optimizer.step()`` leaves ``training_step``; in the last turn that runs to its end.
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
    """The turn at hand is done: ``training_step`` is left. No ``except Exception`` of a module holds it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What ``training_step`` does for one batch.

    Attributes:
        optimizers: the numbers of those that step, in order. ``norms``: to what each of these steps clips its gradient.
        ends: by turn, how many of these steps are done at its end.
        owners: by schedule, the number of its optimizer.
    """

    optimizers: tuple[int, ...]
    norms: tuple[float | None, ...]
    ends: tuple[int, ...]
    owners: tuple[int, ...]

    def begin(self, turn: int) -> int:
        """How many of the steps are done when it begins."""
        return (0, *self.ends)[turn]

    def due(self, turn: int, noted: list[tuple[int, int]]) -> list[int]:
        """Which schedules the commit of ``turn`` steps; ``noted``: (number of a schedule, how many steps were done before)."""
        begin, end, last = self.begin(turn), self.ends[turn], turn + 1 == len(self.ends)
        due = [(number, at) for number, at in noted if begin <= at < end + last]
        if any(self.owners[number] in self.optimizers[at:end] for number, at in due):
            raise refused("schedule order")
        return [number for number, _ in due]


class Hand(ABC):
    """What a running ``training_step`` does by hand comes here.

    Attributes:
        done: how many steps of optimizers were made.
        noted: see :meth:`Turns.due`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.module = trainer, trainer.lightning_module
        self.done, self.noted = 0, list[tuple[int, int]]()
        self._clipped: dict[int, float] = {}

    def backward(self, loss: torch.Tensor, *given: Any, **named: Any) -> None:
        """In the place of ``manual_backward``."""
        retained = bool(named.pop("retain_graph", False))
        if given or any(value not in (None, False) for value in named.values()):
            raise refused("backward", ", ".join(named) or "gradient")
        self.learns(loss, retained)

    def clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """In the place of ``clip_gradients``."""
        if gradient_clip_algorithm != "norm":
            raise refused("clip_gradients", "value")
        if clip_val > 0:
            self._clipped[self.number(optimizer)] = float(clip_val)

    def step(self, optimizer: Any, closure: Any, **named: Any) -> None:
        """In the place of ``optimizer.step()``."""
        if closure is not do_nothing_closure or named:
            raise refused("optimizer.step", ", ".join(named) or "closure")
        number = self.number(optimizer)
        self.done += 1
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += 1
        self.steps(number, self._clipped.pop(number, None))

    def number(self, optimizer: Any) -> int:
        """Of an optimizer."""
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
        """Optimizer ``number`` steps, with a gradient that is clipped to ``norm``. It counts in ``done``."""

    @abstractmethod
    def returned(self) -> None:
        """``training_step`` has come to its end."""


class OneTurn(Hand):
    """One turn of one shard. ``backward`` is given what there is to learn from."""

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
        if self.done == self._begin:  # what the forwards of earlier turns do to buffers counts in those turns
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
        for one, _ in self._gradients:  # it may clear them from here on
            one.grad = None

    def returned(self) -> None:
        """See :class:`Hand`."""
        if self.done != len(self._turns.optimizers):
            raise refused("others")
        for one, gradient in self._gradients:
            one.grad = gradient


class ByHand:
    """Of one call of ``fit()``.

    Args:
        batch: a micro-batch, for ranks that have none.

    Attributes:
        turns: of each batch.
        due: the numbers of schedules that the commit at hand steps.
    """

    def __init__(self, trainer: Any, turns: Turns, batch: Any) -> None:
        self._trainer, self.turns, self._batch = trainer, turns, batch
        self._noted: tuple[int, list[tuple[int, int]]] = (-1, [])
        self.due: list[int] = []

    def taken(self, number: int) -> tuple[int, ...]:
        """The numbers of the optimizers that step ``number`` takes."""
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
        """On a rank that has had no shard of step ``number``: it comes to the same schedules."""
        if not self._trainer.lr_scheduler_configs or self._noted[0] == number:
            return
        with as_before(self._trainer.lightning_module):
            self.run(number, copy.deepcopy(self._batch), batch_idx, lambda loss: None)
        self._trainer.fit_loop.epoch_loop._results.clear()


def run_by_hand(trainer: Any, hand: Hand, batch: Any, batch_idx: int, stepped: int = 0) -> None:
    """``training_step``, whose deeds come to ``hand``; optimizers have ``stepped`` so often ahead of the batch.

    Which parameters require a gradient is afterwards as it was before.
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
    """Of pairs: each tensor gets the values of the other one."""
    for one, value in kept:
        one.copy_(value)


@contextmanager
def as_before(module: Any) -> Iterator[None]:
    """Afterwards buffers and generators are as they were before."""
    buffers = [(one, one.clone()) for one in module.buffers()]
    with generators_kept():
        try:
            yield
        finally:
            put_back(buffers)


@contextmanager
def stepped_by_commits(trainer: Any) -> Iterator[list[Callable[[], None]]]:
    """Meanwhile ``step()`` of a schedule is noted in ``training_step``, and refused elsewhere. What is given steps them.

    By a class of its own, as a schedule's state_dict holds its attributes.
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
