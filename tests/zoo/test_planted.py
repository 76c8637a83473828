"""Faults of each kind, planted into the real step: what the zoo compares shows every one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.layout import StateLayout
from actors.rank.step.module_buffers import ModuleBuffers
from actors.rank.step.step import Step
from actors.rank.step.train_step import TrainStep
from tests.zoo.harness import all_of, alone, differences, plain

Patch = pytest.MonkeyPatch
STEP, SHARD = 7, 3
"""A fault that strikes once strikes in this step, and in this shard of it."""


def instead(patch: Patch, owner: type, method: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """``make`` is given the right method."""
    patch.setattr(owner, method, make(getattr(owner, method)))


def stale_gradient(patch: Patch) -> None:
    """One step is taken with the gradient of the step before."""
    before: list[list[torch.Tensor]] = []

    def make(right: Any) -> Any:
        @contextlib.contextmanager
        def summed(self: Any) -> Iterator[Any]:
            with right(self) as found:
                yield found
            before.append([flat.clone() for flat in self.mean.flats])
            if len(before) == STEP:
                for flat, stale in zip(self.mean.flats, before[-2], strict=True):
                    flat.copy_(stale)

        return summed

    instead(patch, GradientBuffers, "summed", make)


def left_gradient(patch: Patch) -> None:
    """One shard begins with the gradient of the shard before."""

    def make(right: Any) -> Any:
        def end_shard(self: Any, shard: int, *arguments: Any) -> None:
            if shard == SHARD:
                with torch.no_grad():
                    for one, left in zip(self.parameters, self._before, strict=True):
                        if one.grad is not None and left is not None:
                            one.grad.add_(left)
            self._before = [None if one.grad is None else one.grad.clone() for one in self.parameters]
            right(self, shard, *arguments)

        return end_shard

    instead(patch, GradientBuffers, "end_shard", make)


def doubled_update(patch: Patch) -> None:
    """The optimizer takes one step twice."""
    taken: list[None] = []

    def make(right: Any) -> Any:
        def apply(self: Any, move: Any) -> None:
            taken.append(None)
            if len(taken) == STEP:
                self.update.optimizers[0].step()
            right(self, move)

        return apply

    instead(patch, TrainStep, "apply", make)


def weighed(patch: Patch, weight_of: Callable[[Step, float], float | None]) -> None:
    def make(right: Any) -> Any:
        return lambda self, loss, weight=None: right(self, loss, weight_of(self, weight))

    instead(patch, Step, "backward", make)


def mean_of_means(patch: Patch) -> None:
    """Losses count alike, whatever their weights."""
    weighed(patch, lambda step, weight: 1.0 if weight else 0.0)


def dropped_weight(patch: Patch) -> None:
    """One loss counts nothing."""
    weighed(patch, lambda step, weight: 0.0 if (step.number, step.shard) == (STEP, SHARD) else weight)


def zeros_for_none(patch: Patch) -> None:
    """A parameter that no shard has used has a gradient, of zeros."""
    patch.setattr(GradientBuffers, "keep_present", lambda self, present, elsewhere: setattr(self.mean, "present", present))


def lost_buffers(patch: Patch) -> None:
    """What forwards have done to buffers is lost in one step."""

    def make(right: Any) -> Any:
        def commit(self: Any, changes: Sequence[torch.Tensor]) -> None:
            self._steps = getattr(self, "_steps", 0) + 1
            right(self, [torch.zeros_like(change) for change in changes] if self._steps == STEP else changes)

        return commit

    instead(patch, ModuleBuffers, "commit", make)


def left_out_callback(patch: Patch) -> None:
    """What was given to ``step.on_commit`` is not called in one step."""

    def make(right: Any) -> Any:
        return lambda self, fn: None if self.number == STEP else right(self, fn)

    instead(patch, Step, "on_commit", make)


def unclipped(patch: Patch) -> None:
    """The gradient is not clipped."""
    patch.setattr(StateLayout, "clip", lambda self, gradients: None)


def other_draws(patch: Patch) -> None:
    """The random numbers of one shard are others."""

    def make(right: Any) -> Any:
        def begin_shard(self: Any, shard: int) -> None:
            right(self, shard)
            if shard == SHARD:
                torch.manual_seed(1)

        return begin_shard

    instead(patch, TrainStep, "begin_shard", make)


FAULTS = [
    (stale_gradient, "groups"),
    (left_gradient, "heads"),
    (doubled_update, "lora"),
    (mean_of_means, "padded"),
    (dropped_weight, "padded"),
    (zeros_for_none, "thawed"),
    (zeros_for_none, "unused"),
    (lost_buffers, "classifier"),
    (lost_buffers, "codebook"),
    (left_out_callback, "ema"),
    (unclipped, "language_model"),
    (other_draws, "checkpointed"),
]


@pytest.mark.parametrize(("plant", "name"), FAULTS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_planted_fault_is_seen(plant: Callable[[Patch], None], name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    right = all_of(plain(name, 16))
    plant(monkeypatch)
    found, _ = alone(name, 16, tmp_path)
    assert [path for path in differences(all_of(found), right, exact=False) if path.startswith(("model.", "average."))]
