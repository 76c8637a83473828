"""Finds the manual optimizer steps of ``training_step`` before the first step: it runs for one micro-batch, and its effects are undone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from actors.rank.data.sampling import seed_shard
from actors.rank.integrations.lightning_manual import Hand, OneTurn, Turns, as_before, put_back, run_by_hand, stepped_by_commits
from actors.rank.integrations.lightning_refused import by_hand_refused as refused

MOVED = 0.1
"""In place of an optimizer step, weights change by this share of other weights."""


def probed(trainer: Any, seed: int, batch: Any) -> Turns:
    """The turns of each batch: those of ``training_step`` for ``batch``, the first micro-batch of the run.

    Raises ConfigError for an unsupported call.
    """
    module, last = trainer.lightning_module, int(trainer.num_training_batches) - 1
    weights = [(one, one.detach().clone()) for optimizer in trainer.optimizers for one in _parameters(optimizer)]
    hooks = [one.register_step_pre_hook(_refuse) for one in trainer.optimizers]

    def run(hand: Hand, number: int) -> None:
        seed_shard(seed, 0, 0)
        run_by_hand(trainer, hand, copy.deepcopy(batch), number)

    try:
        with as_before(module), stepped_by_commits(trainer):
            probes = []
            for number in (0, min(1, last), last):
                put_back(weights)
                with as_before(module):
                    probes.append(Probe(trainer))
                    run(probes[-1], number)
            _check(trainer, probes)
            for turn in range(1, len(probes[0].losses)):
                put_back(weights)
                _check_again(trainer, probes[0], turn, run)
        return probes[0].turns
    finally:
        put_back(weights)
        module.zero_grad()
        trainer.fit_loop.epoch_loop._results.clear()
        for hook in hooks:
            hook.remove()


class Probe(Hand):
    """Notes the calls of ``training_step``. Where an optimizer would step, it changes the weights, and checks the gradients.

    Attributes:
        losses: by turn; ``buffers``: by turn, at its end.
        moved: by step, the parameters that it has changed.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.losses: list[float] = []
        self.buffers: list[list[torch.Tensor]] = []
        self.moved: list[list[torch.nn.Parameter]] = []
        self._steps: list[tuple[int, float | None]] = []
        self._ends: list[int] = []
        self._turn, self._learning = set[int](), False
        self._written: list[int] = []

    @property
    def turns(self) -> Turns:
        """The turns that were noted."""
        numbers, norms = zip(*self._steps, strict=True)
        owners = [self.number(each.scheduler.optimizer) for each in self.trainer.lr_scheduler_configs]
        return Turns(numbers, norms, tuple(self._ends), tuple(owners))

    def learns(self, loss: torch.Tensor, retained: bool) -> None:
        """See :class:`Hand`."""
        if not self._learning:
            for one in _dense(self.module.parameters()):  # so gradients left by earlier turns spoil gradients added to them
                one.masked_fill_(one != 0, math.nan)
            self.losses.append(0.0)
            self._learning = True
        loss.backward(retain_graph=retained)
        self.losses[-1] += float(loss.detach())
        self._written = self._writes()

    def steps(self, number: int, norm: float | None) -> None:
        """See :class:`Hand`."""
        if not self.losses or (not self._learning and number in self._turn):
            raise refused("no backward")
        if self._writes() != self._written:
            raise refused("gradients")
        moved = [one for one in _parameters(self.trainer.optimizers[number]) if one.grad is not None]
        if math.isfinite(self.losses[-1]) and any(bool(one.isnan().any()) for one in _dense(moved)):
            raise refused("zero_grad")
        _move(moved)
        torch.clear_autocast_cache()  # a later turn casts the changed weights
        self._steps.append((number, norm))
        self.moved.append(moved)
        if self._learning:
            self._ends.append(self.done)
            self.buffers.append([])
            self._turn, self._learning = set(), False
        self._turn.add(number)
        self._ends[-1], self.buffers[-1] = self.done, [one.clone() for one in self.module.buffers()]

    def returned(self) -> None:
        """See :class:`Hand`."""
        if not self._steps:
            raise refused("no step")

    def _writes(self) -> list[int]:
        return [one._version for one in _dense(self.module.parameters())]


def _check(trainer: Any, probes: list[Probe]) -> None:
    """Raises ConfigError unless all batches take the same steps, and the commit can step the schedules."""
    turns = probes[0].turns
    if any(probe.turns != turns for probe in probes):
        raise refused("others")
    for number, optimizer in enumerate(trainer.optimizers):
        norms = {norm for one, norm in zip(turns.optimizers, turns.norms, strict=True) if one == number}
        if len(norms) != 1:
            raise refused("clip_gradients", "several norms") if norms else refused("never", type(optimizer).__name__)
    for probe in probes:
        for turn in range(len(turns.ends)):
            turns.due(turn, probe.noted)


def _check_again(trainer: Any, probe: Probe, turn: int, run: Callable[[Hand, int], None]) -> None:
    """Raises ConfigError unless ``turn`` has the same loss when ``training_step`` runs from its top with the changed weights, as in a step
    of
    Fleet."""
    for moved in probe.moved[: probe.turns.begin(turn)]:
        _move(moved)
    put_back(list(zip(trainer.lightning_module.buffers(), probe.buffers[turn - 1], strict=True)))
    losses: list[torch.Tensor] = []
    run(OneTurn(trainer, probe.turns, turn, losses.append), 0)
    found, right = sum(float(one.detach()) for one in losses), probe.losses[turn]
    if math.isfinite(right) and not math.isclose(found, right, rel_tol=1e-3, abs_tol=1e-5):
        raise refused("kept", f"loss {turn + 1} is {right:.6g}, and {found:.6g} from the top")


def _refuse(*given: Any) -> None:
    raise refused("optimizers")


def _dense(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None and not one.grad.is_sparse]


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


@torch.no_grad()
def _move(parameters: list[torch.nn.Parameter]) -> None:
    """Add a share of the parameters in reversed order: this also changes layers whose output does not depend on their scale."""
    for one in parameters:
        one.add_(one.reshape(-1).flip(0).reshape(one.shape), alpha=MOVED)
