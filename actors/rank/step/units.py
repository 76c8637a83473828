"""The units of one step that a rank of a pipeline computes: forwards of several shards are open at a time, and their backwards follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from actors.rank.data.feeds import Feed
from actors.rank.data.sampling import seed_layer
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from fleet.protocol.pipelining import StageShares, Turns, Ways
from fleet.protocol.rank_machine import RankMachine
from fleet.protocol.records import COMM, COMPUTE, DATA


class OwnLoop(Protocol):
    """The loop of the step. See :class:`actors.rank.step.step.Loop`."""

    seed: int
    rehearsing: bool
    recorder: Recorder
    rank_machine: RankMachine


class OwnStep(Protocol):
    """The step whose units are computed. See :class:`actors.rank.step.step.Step`."""

    number: int
    losses: dict[int, float]

    def _pending(self) -> tuple[int, ...]: ...

    def _cut_short(self) -> None: ...

    def _enter(self, shard: int) -> None: ...

    def _backward_of(self, shard: int, loss: torch.Tensor, weight: float | None) -> float: ...


class StepUnits:
    """Those of ``step``. :class:`actors.rank.mesh.pipe.Pipeline` computes them.

    Attributes:
        rehearsing: the step is computed for practice, by this rank alone.
        pending: gives the shards of the units that this rank has yet to compute. ``cut_short``: this attempt ends before that.
        backward_of: the backward of a shard's loss; gives the mean loss.
    """

    def __init__(self, step: OwnStep, loop: OwnLoop, train: TrainStep, feed: Feed) -> None:
        self._step, self._loop, self._train, self._feed = step, loop, train, feed
        self.rehearsing, self._recorder = loop.rehearsing, loop.recorder
        self.pending, self.cut_short, self.backward_of = step._pending, step._cut_short, step._backward_of

    @property
    def leaves(self) -> bool:
        """The rank is called away, or what it computes is of no use."""
        return self._loop.rank_machine.wanted or bool(self._train.layout.useless)

    @property
    def _ways(self) -> Ways:
        """Without a view, as where a script is tried, this rank has all layers."""
        contributions = self._train.contributions
        return contributions.ways or Ways([StageShares((0,), (frozenset(),), (contributions.assigned,))])

    def turns(self, stage: int) -> Turns:
        """The units that this rank computes, in order."""
        return self._ways.turns(stage, self._train.contributions.rank)

    def source(self, shard: int, stage: int) -> int:
        """The view rank that gives what another stage makes of ``shard``: it computes that unit, or has computed it."""
        ways = self._ways
        return ways.computing[stage].get(shard, ways.holding[stage].get(shard, -1))

    def computing(self, shard: int, stage: int) -> int | None:
        """The view rank that computes a unit; None: it is computed."""
        return self._ways.computing[stage].get(shard)

    def batch(self, shard: int) -> Any:
        """The batch of a shard."""
        recorder = self._recorder
        recorder.switch(DATA)
        found = self._feed.get(self._step.number, shard)
        recorder.switch(COMPUTE)
        return found

    def seed(self, shard: int, layer: int) -> None:
        """Layer ``layer`` draws its random numbers for ``shard`` now."""
        seed_layer(self._loop.seed, self._step.number, shard, layer)

    @contextlib.contextmanager
    def inside(self, shard: int) -> Iterator[None]:
        """Context of code of the loop for ``shard``, such as ``step.log``."""
        self._step._enter(shard)
        try:
            yield
        finally:
            self._step._enter(-1)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait for another stage."""
        with self._recorder.during(COMM):
            yield

    def worked(self) -> None:
        """All units of this rank are computed."""
        self._recorder.worked()

    def begin_forward(self, shard: int) -> None:
        """Right before this stage's forward."""
        self._recorder.shard(shard)
        self._train.begin_forward()

    def end_forward(self) -> None:
        """Other halves may follow before this unit's backward."""
        self._recorder.shard(-1)

    def begin_backward(self, shard: int, weight: float | None = None) -> None:
        """Right before this stage's backward. ``weight``: of the shard's loss, where a later stage has it."""
        self._recorder.shard(shard)
        self._train.begin_shard(shard)
        if weight is not None:
            self._train.scaled_elsewhere(weight)

    def end_backward(self, shard: int, loss: float) -> None:
        """The gradients of this stage's parameters are there. ``loss``: zero where a later stage has it."""
        self._step.losses[shard] = loss
        self._train.end_shard(shard, loss)
        self._recorder.shard(-1)
