"""``Step``, the object that a train function gets for each step. See :mod:`actors.rank.loop`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch

from actors.rank.data.feeds import Feed, Feeds
from actors.rank.data.reporting import DataReporter
from actors.rank.data.sampling import seed_shard, seed_step
from actors.rank.membership.client import Client
from actors.rank.membership.process_group import GroupBroken
from actors.rank.step.flops import FlopCount
from actors.rank.step.train_step import TrainStep
from actors.rank.step.units import StepUnits
from actors.rank.telemetry.garbage import Garbage
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import LoopError
from fleet.protocol.rank_machine import RankMachine
from fleet.protocol.records import COMM, COMPUTE, DATA, PROGRAM, TOKENS, VERIFY

RESERVED = {"loss", *PROGRAM}
"""Figures that a run notes of each step by itself."""


@dataclass(slots=True)
class Loop:
    """Data that all steps of one loop share.

    Attributes:
        attempt: carries out moves up to the next move that the loop makes itself: see :meth:`Membership.carry`.
        step: the current step; ``attempted``: the step whose commit was called last.
        rank: the view rank of this process. ``reporter``: reports facts of the data to the run.
        rehearsing: the current step is computed for practice, and forgotten; ``rehearsed``: its data, and how many samples a step has.
        committed: the current step is committed.
        left: the loop body was left before the last step.
        total: number of steps of the whole run.
        flops: counts the model's FLOPs once.
    """

    seed: int
    client: Client
    recorder: Recorder
    rank_machine: RankMachine
    feeds: Feeds
    attempt: Callable[[], Any]
    garbage: Garbage
    step: Step | None = None
    attempted: Step | None = None
    rank: int = 0
    reporter: DataReporter = field(default_factory=DataReporter)
    rehearsing: bool = False
    rehearsed: tuple[Feed, int] | None = None
    committed: bool = False
    left: bool = False
    total: int = 0
    flops: FlopCount = field(default_factory=FlopCount)


class Step:
    """One attempt at one optimizer step.

    Attributes:
        number: how many steps were committed before it: 0 in the first. The same on all ranks.
        shards: the numbers of this rank's micro-batches (batch shards), to which a loss of another rank may add.
        shard: the number of the current shard; -1 outside ``batches``.
        loss: mean loss over all shards of all ranks, once the step is committed; NaN before. Functions of ``on_commit`` see it, too.
        grad_norm: the norm of the step's whole gradient before clipping, once the step is committed.
        rehearsal: the loop body runs for practice: the step will not be committed. See ``Run.steps``.
        begun: ``batches`` was called. ``closed``: ``commit`` was called.
        behind: functions that ``commit`` calls just before it returns True.

    When a rank is lost, the others keep the shards that they have computed. The step comes again for the lost shards alone, shared out
    among all.
    """

    def __init__(self, loop: Loop, train: TrainStep, number: int) -> None:
        self.number, self.rehearsal = number, loop.rehearsing
        self.loss = self.grad_norm = math.nan
        self.closed = self._cut = self.begun = False
        self.losses: dict[int, float] = {}
        self.figures: dict[str, SupportsFloat] = {}
        self._logged: dict[str, SupportsFloat] = {}
        self._judged: float | None = None
        self.callbacks: list[Callable[[], None]] = []
        self.behind: list[Callable[[], object]] = []
        self._loop, self._train, self._gathered = loop, train, train.contributions.gathered
        self.shard, self.shards = -1, train.assigned
        loop.committed = False
        train.body.enter(number)
        seed_step(loop.seed, number)
        loop.flops.step_begins()

    def batches(
        self, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None = None, *, tokens: int = 0
    ) -> Iterator[Any]:  # fmt: skip
        """This rank's shards of this step: one collated batch of ``batch_size / shards`` samples each.

        The samples of a shard depend on seed, step and shard alone. So each sample comes once an epoch, also when ranks are lost.

        Args:
            dataset: map-style, with ``len()`` and ``[]``; or ``fleet.data.ShardedDataset`` or ``Streams``, which are fetched ahead.
            batch_size: samples of the whole step, on all ranks together; a multiple of the number of shards.
            collate_fn: makes a batch of a list of samples, as in torch's DataLoader. It may draw random numbers, and may keep no state.
            tokens: how many each sample has, for the report's tokens a second and price of a million tokens; 0: the report has neither.

        Yields:
            One collated batch for each shard; none on a rank that has just joined, nor on a spare in the view of a sharded run.

        Raises:
            ConfigError: the dataset has no ``len()`` or ``[]``, or ``batch_size`` is no multiple of the number of shards.
            LoopError: it is called twice in a step, or the loop body does not call ``backward`` for a batch.
        """
        loop, recorder = self._loop, self._loop.recorder
        feed = self._feed_of(dataset, batch_size, collate_fn, tokens)
        kept: dict[int, Any] = {}  # batches of shards that are computed twice
        while pending := self._pending():
            if loop.rank_machine.wanted or self._train.layout.useless or not self._gather(pending):
                self._cut_short()
                return
            lacking = self._gathered.lacking(pending)
            shard = (lacking or pending)[0]
            recorder.switch(DATA)
            batch = kept.pop(shard) if shard in kept else feed.get(self.number, shard)
            recorder.switch(COMPUTE)
            if lacking:
                kept[shard] = copy.deepcopy(batch)
                yield from self._look(shard, batch)
            else:
                yield from self._compute(shard, batch, self._train.end_shard)
        recorder.worked()
        for shard in self._train.checks:
            if loop.rank_machine.wanted or self._train.layout.useless:
                return
            recorder.switch(VERIFY)
            yield from self._compute(shard, feed.get(self.number, shard), lambda shard, loss: self._train.end_check(shard))
            del self.losses[shard]

    def _feed_of(self, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, tokens: int) -> Feed:
        """The source of this step's batches. Raises ConfigError, LoopError: see :meth:`batches`."""
        loop = self._loop
        if self.begun:
            raise LoopError(f"step {self.number}: step.batches() was called twice; a dataset of both together gives each shard one batch")
        self.begun = True
        if tokens:
            self.figures[TOKENS] = batch_size * tokens
        feed = loop.feeds.of(dataset, batch_size, collate_fn)
        if loop.rehearsing:
            loop.rehearsed = feed, batch_size
        elif loop.rank == 0:
            self._report_data(feed, batch_size)
        now = [(self.number, shard) for shard in self.shards + self._train.checks]
        feed.expect(now + [(self.number + 1, shard) for shard in self._train.duties.next_assigned])
        return feed

    def _cut_short(self) -> None:
        """This attempt ends before all its shards are computed."""
        self._cut = True

    def _pending(self) -> tuple[int, ...]:
        """The shards that this attempt has yet to compute. When a rank is lost meanwhile, some of its shards are added."""
        assigned = self._train.assigned
        self.shards += tuple(shard for shard in assigned if shard not in self.shards)
        return assigned

    def _report_data(self, feed: Feed, batch_size: int) -> None:
        """Report the data set, once in each history and not in each step: it reads up to three samples."""
        here = self._loop.client.protocol.state
        if not self._loop.reporter.is_news(feed, batch_size, here.history if here is not None else -1):
            return
        with self._loop.recorder.during(DATA):
            self._loop.reporter.report(feed, self.number, self._loop.client, self._loop.total)

    def _gather(self, pending: Sequence[int]) -> bool:
        """Whether a batch can be computed now. Waits for other shards' representations where the loss needs them."""
        if self._gathered.complete or self._gathered.lacking(pending):
            return True
        recorder = self._loop.recorder
        recorder.switch(COMM)
        try:
            self._train.contributions.gather()
        except GroupBroken:
            return False
        return True

    def _enter(self, shard: int) -> None:
        """The loop body computes ``shard`` from here on."""
        self.shard = shard
        self._train.contributions.carried.enter(shard)

    def _look(self, shard: int, batch: Any) -> Iterator[Any]:
        """The first of two passes, see :mod:`actors.rank.step.representations`."""
        recorder = self._loop.recorder
        recorder.shard(shard)
        seed_shard(self._loop.seed, self.number, shard)
        self._train.begin_look(shard)
        self._gathered.begin(shard, looking=True)
        self._enter(shard)
        begun_us = recorder.now_us()
        with torch.no_grad():
            yield batch
        self._enter(-1)
        self._gathered.end()
        self._gathered.looked_us += recorder.now_us() - begun_us
        self._train.end_look()
        recorder.shard(-1)

    def _compute(self, shard: int, batch: Any, end: Callable[[int, float], None]) -> Iterator[Any]:
        recorder = self._loop.recorder
        recorder.shard(shard)
        seed_shard(self._loop.seed, self.number, shard)
        self.losses.pop(shard, None)
        self._train.begin_shard(shard)
        self._gathered.begin(shard, looking=False)
        self._enter(shard)
        with self._loop.flops.shard():
            yield batch
        self._enter(-1)
        self._loop.flops.shard_ends()
        if self._gathered.end():  # the body called step.gather for the first time in this process
            self._train.end_look()
            return
        if shard not in self.losses:
            reason = "the loop body did not call step.backward(loss) for this batch; it stands in the place of loss.backward()"
            raise LoopError(f"step {self.number}, shard {shard}: {reason}")
        self._train.body.collected()
        weights = self._train.shard_weights
        if weights.given:
            self.losses[shard] /= weights.given / weights.unit
        end(shard, self.losses[shard])
        recorder.shard(-1)

    def backward(self, loss: torch.Tensor, weight: SupportsFloat | None = None) -> None:
        """Compute the gradients of one shard's mean loss. The step's gradient is the mean over shards, so do not divide the loss.

        Args:
            loss: a tensor of no dimension. With several calls for a batch, the sum of their losses counts. A tracked GradScaler is applied
                here.
            weight: this loss's part of the step, such as the number of tokens in its mean. The step's gradient is then the sum over losses
                of ``weight / N`` times their gradient. N is the sum of all weights of the step, on all ranks. A loss of weight 0 does not
                count, even if it is not finite. Give all losses of a step a weight, or none.

        Raises:
            LoopError: the call is outside ``for batch in step.batches(...)``; a weight is negative or not finite; or other losses have
                none.
        """
        if self.shard < 0:
            raise LoopError("step.backward() belongs inside `for batch in step.batches(...)`")
        if self._gathered.looking:
            return
        if weight is not None and self._gathered.used:
            raise LoopError(
                f"step {self.number}: step.backward(weight=...) with step.gather(): its loss is that of the whole batch already"
            )
        self._backward(loss, weight)

    def _backward_of(self, shard: int, loss: torch.Tensor, weight: float | None) -> float:
        """:meth:`backward` of one shard of a pipeline. Gives the mean loss."""
        self.losses.pop(shard, None)
        self._enter(shard)
        self._backward(loss, weight)
        self._enter(-1)
        weights = self._train.shard_weights
        return self.losses[shard] / (weights.given / weights.unit) if weights.given else self.losses[shard]

    def _backward(self, loss: torch.Tensor, weight: SupportsFloat | None) -> None:
        given = None if weight is None else float(weight)
        begin = self._train.scaled(loss, given)
        value = float(loss.detach()) if begin is not None else 0.0
        share = 1.0 if given is None else given / self._train.shard_weights.unit
        self.losses[self.shard] = self.losses.get(self.shard, 0.0) + value * share
        if begin is not None:
            begin.backward()
        self._train.body.computed()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor of all shards of the step, for a loss that compares all samples of the batch, such as SimCLR's and CLIP's.

        The loop body then runs twice for each shard. The first run, without gradients, gives the shard's tensor. The second run has the
        tensors of all shards, and computes the loss of the whole batch. Fleet adds up the gradients of each shard's own rows.

        Args:
            tensor: of shape (samples of the shard, ...), the same shape and type in each shard of the step. At most eight calls a shard.

        Returns:
            Shape (samples of the step, ...), in the order of the shards. This shard's rows have gradients.

        Raises:
            LoopError: the call is outside ``for batch in step.batches(...)``, or the tensors of two shards differ in shape or type. Or a
                shard calls it more or less often than another one, or gives another tensor than in the first pass.
        """
        if self.shard < 0:
            raise LoopError("step.gather() belongs inside `for batch in step.batches(...)`")
        return self._gathered.gather(tensor)

    def log(self, *, local: bool = False, **figures: SupportsFloat) -> None:
        """Figures of this step, such as ``step.log(entropy=1.2)``, for the run's journal, report, page and metrics, once it is committed.

        A call within a batch logs the figure of that shard. A call after the batches logs it for all shards that this rank has just
        computed. The run reports the mean over all shards, by their weights where ``backward`` has them: the same at any number of ranks.
        It does so about twice a second, and in the last step. A tensor of one number is read when it is reported, not before.

        Args:
            local: the run reports the value of the view's first rank, as ``local/NAME``. It depends on which shards that rank has.

        Raises:
            LoopError: the call is after ``commit``, or Fleet itself notes a figure of that name.
        """
        if self.closed:
            raise LoopError(f"step {self.number}: step.log() belongs before step.commit()")
        if taken := RESERVED & figures.keys():
            raise LoopError(f"step {self.number}: step.log({min(taken)}=...): Fleet notes that by itself; choose another name")
        if self._gathered.looking:
            return
        if local:
            self.figures.update({f"local/{name}": value for name, value in figures.items()})
        elif self.shard >= 0:
            self._train.contributions.log.note(self.shard, figures)
        else:
            self._logged.update(figures)

    def plateau(self, value: SupportsFloat) -> None:
        """In this step's commit step each tracked ``ReduceLROnPlateau`` by ``value``, before the optimizer: the new rate counts in this
        step.

        Call it before ``commit``, on all ranks alike, with a figure of ``run.evaluate``, which stands before ``step.batches``.

        Raises:
            LoopError: the call is after ``commit``, or no such scheduler is tracked.
        """
        if self.closed:
            way_out = "Put run.evaluate and it before step.batches() of the next step."
            raise LoopError(f"step {self.number}: step.plateau() stands after step.commit(). {way_out}")
        if not self._train.update.plateaus:
            raise LoopError(f"step {self.number}: step.plateau() was called, and no ReduceLROnPlateau is tracked. Give it to run.track().")
        self._judged = float(value)

    def on_commit(self, fn: Callable[[], None]) -> None:
        """``fn`` runs right after this step is committed, exactly once on each rank that commits it. Call it before ``commit``.

        Args:
            fn: may change tracked objects, such as an average of the weights, in the same way on all ranks.
        """
        self.callbacks.append(fn)

    def commit(self, *optimizers: torch.optim.Optimizer) -> bool:
        """Sum the gradients in fixed order, clip, step optimizers, scaler and schedulers.

        Args:
            optimizers: the tracked optimizers that take this step, together with their schedulers; none named: all. Parameters of the
                others do not change, and their gradients are dropped. All ranks name the same optimizers.

        Returns:
            False when the step will be repeated, or was a rehearsal: nothing has changed.

        Raises:
            LoopError: it is called twice, or before all batches of the step were computed. Or it names an optimizer that is not tracked, or
                others than other ranks name.
            ConfigError: none of the run's first steps has taken a tracked optimizer.
        """
        taken = self._train.update.of(optimizers)
        if self.closed:
            raise LoopError(f"step {self.number} was committed twice")
        self.closed = True
        missing = set(self.shards) - set(self.losses)
        if missing and not self._cut:
            raise LoopError(
                f"step {self.number}: commit() before shards {sorted(missing)} were computed; iterate step.batches() to its end"
            )
        if self._loop.rehearsing:
            return False
        for shard in self.losses:
            self._train.contributions.log.note(shard, self._logged)
        self._train.body.check()
        self._loop.attempted = self
        self._train.update.judged = self._judged
        self._train.begin_attempt(taken)
        self._loop.attempt()
        self._loop.recorder.between(self._loop.committed)
        committed = self._train.taken is not None
        self._train.body.enter(self.number + committed)
        if not committed:
            return False
        self._train.update.check_named(self.number + 1, self._loop.total)
        for fn in self.behind:
            fn()
        return True


def units_of(
    step: Step, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, *, tokens: int = 0
) -> StepUnits:  # fmt: skip
    """This rank's units of a step, for :meth:`actors.rank.mesh.pipe.Pipeline.step`. The rest is as for :meth:`Step.batches`."""
    return StepUnits(step, step._loop, step._train, step._feed_of(dataset, batch_size, collate_fn, tokens))
