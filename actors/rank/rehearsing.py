"""The first step of a process: it is not committed, and shows how the rank has built its model, optimizer and data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from actors.rank.state.tracked import TrackedState
from actors.rank.step.step import Loop
from actors.rank.step.train_step import TrainStep
from actors.rank.zero1.chunked import ChunkedOptimizer
from fleet.protocol.facts import RunBuilt
from fleet.protocol.types import ENDS, Build


@contextmanager
def rehearsing(train: TrainStep, loop: Loop) -> Iterator[None]:
    """Context of a step for practice, whose time does not count as that of steps. After it the rank reports its build."""
    train.rehearse()
    loop.recorder.paused = loop.rehearsing = True
    loop.client.on_rehearsal(True)
    yield
    loop.client.on_rehearsal(False)
    loop.recorder.paused = loop.rehearsing = False
    train.forget()
    loop.client.say(RunBuilt(loop.client.protocol.member, build_of(train.state, loop)))


def build_of(state: TrackedState, loop: Loop) -> Build:
    """The build: of the tracked objects, and of the data of the first step."""
    optimizers = tuple(type(optimizer).__qualname__ for tracked in state.objects.values() if (optimizer := _optimizer(tracked)))
    schedules = tuple(sorted(end for tracked in state.objects.values() for end in _ends(tracked)))
    if loop.rehearsed is None:
        return Build(optimizers, schedules=schedules, total_steps=loop.total)
    feed, batch_size = loop.rehearsed
    return Build(optimizers, feed.kind, feed.samples, batch_size, feed.samples_sha256, schedules, loop.total)


def _optimizer(tracked: Any) -> torch.optim.Optimizer | None:
    """The optimizer that the user has built, also where its state is spread over ranks and another object is tracked in its place."""
    built = tracked.optimizer if isinstance(tracked, ChunkedOptimizer) else tracked
    return built if isinstance(built, torch.optim.Optimizer) else None


def _ends(tracked: Any) -> list[tuple[str, int]]:
    """(name, step) of each end that a scheduler has. A scheduler inside another, as in SequentialLR, does not count."""
    if not isinstance(tracked, LRScheduler):
        return []
    found = [(f"{type(tracked).__qualname__}.{name}", getattr(tracked, name, None)) for name in ENDS]
    return [(name, int(end)) for name, end in found if isinstance(end, int)]
