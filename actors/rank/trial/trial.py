"""One rank that computes all shards of a few steps by itself, in this process: without coordinator, agent and peers, and without saving."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

import torch

from actors.rank.current import within
from actors.rank.data.sampling import seed_all, seed_step, shard_size
from actors.rank.home import Home
from actors.rank.loop import Run
from actors.rank.membership.client import Client
from actors.rank.membership.process_group import Group
from actors.rank.once import EvaluationFigures
from actors.rank.state.tracked import TrackedState
from actors.rank.step.flops import FlopCount
from actors.rank.step.layout import LayoutInputs, StateLayout
from actors.rank.step.step import Step
from actors.rank.step.train_step import TrainStep
from actors.rank.step.update import ClipNorm
from actors.rank.telemetry.recorder import Recorder
from actors.rank.trial.carried import KeptValues
from actors.rank.trial.recording import Book
from actors.rank.trial.surroundings import Surroundings
from fleet.errors import ConfigError, LoopError, RunOver
from fleet.host.clock import now_us
from fleet.ledger.sameness import (
    BUFFER,
    GRADIENT,
    LATE,
    LOSS,
    ORDER,
    RANK,
    RATE,
    START,
    UPDATED,
    WRITTEN,
    Call,
    Trial,
    TrialRequest,
)
from fleet.protocol.moves import Apply
from fleet.protocol.records import GRAD_NORM
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings

Train = Callable[[Any], None]
STEPS, TIMED_STEPS, LATE_BY = 2, 6, 1
"""A second step shows effects of the first. Of timed steps the first does not count."""


class TrialLayout(StateLayout):
    """Marks the results of each shard and of each step."""

    def __init__(self, given: LayoutInputs, book: Book, kept: KeptValues) -> None:
        super().__init__(given)
        self.book, self._kept = book, kept
        modules = given.state.modules
        self._named = {f"{root}.{name}": one for root, module in modules.items() for name, one in module.named_parameters()}
        for name, tensor in [*self._named.items(), *self._buffers()]:
            book.value(START, name, tensor)
        book.watch(modules)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for root, module in self.given.state.modules.items():
            yield from ((f"{root}.{name}", one) for name, one in module.named_buffers())

    def begin_shard(self, shard: int) -> None:
        """See :class:`StateLayout`, here and below."""
        self._kept.look(self.book.step, shard)
        self._versions = {} if self.book.timed else {name: one._version for name, one in self._named.items()}

    def end_shard(self, shard: int, loss: float) -> None:
        book = self.book
        for name, one in self._named.items() if not book.timed else ():
            if one._version != self._versions[name]:
                book.value(WRITTEN, name, one)
        book.add(LOSS, "loss", loss.hex())
        for name, one in self._named.items():
            if one.requires_grad:
                book.value(GRADIENT, name, [] if one.grad is None else one.grad)
        for name, tensor in self._buffers():
            book.value(BUFFER, name, tensor)
        book.shard = -1

    @contextlib.contextmanager
    def stepping(self, *, turns: bool) -> Iterator[list[torch.Tensor]]:
        book, optimizers = self.book, self.given.update.optimizers
        for number, group in enumerate(group for optimizer in optimizers for group in optimizer.param_groups):
            book.value(RATE, f"learning rate of group {number}", float(group["lr"]))
        with super().stepping(turns=turns) as gradients:
            yield gradients
        for name, tensor in [*self._named.items(), *self._buffers()]:
            book.value(UPDATED, name, tensor)
        for name, one in self._named.items():
            held: Mapping[str, Any] = next((found for optimizer in optimizers if (found := optimizer.state.get(one))), {})
            book.value(UPDATED, f"{name} in the optimizer", [held[key] for key in sorted(held)])


class TrialStep(Step):
    """A step that marks its batches. ``share``: it computes one of so many parts of them. ``of_shards``: see :class:`TrialPlan`."""

    book: Book
    share, of_shards = 1, 0
    batch_size = 0

    def batches(self, dataset: Any, batch_size: int, collate_fn: Any = None, *, tokens: int = 0) -> Iterator[Any]:
        """See :class:`Step`."""
        self.batch_size = batch_size
        if self.of_shards:
            shard_size(batch_size, self.of_shards, batch_size)
        if batch_size % self.share:
            raise ConfigError("batch_size", batch_size, f"the batch does not divide into {self.share} ranks", "Choose another --world.")
        for batch in super().batches(dataset, batch_size // self.share, collate_fn, tokens=tokens):
            self.book.step, self.book.shard = self.number, self.shard
            self.book.batch(dataset, batch)
            yield batch

    def backward(self, loss: torch.Tensor, weight: SupportsFloat | None = None) -> None:
        """See :class:`Step`."""
        with self.book.backward():
            super().backward(loss, weight)


@dataclass(frozen=True)
class TrialPlan:
    """The plan of a trial run.

    Attributes:
        asked: the differences to a run.
        steps: how many steps; the loop ends after them.
        before: called before each step, with its number; False ends the loop.
        after: called after each step, with its seconds, its batch size, and the seconds of its first passes.
        share: how many ranks share the batch, of which this one computes its part.
        of_shards: into so many shards the run divides a batch; 0: this is not checked.
        main: whether this process is the one for work that one process should do.
        once: runs functions of ``run.once``.
        tracking: called with the objects of ``run.track``, before they are tracked.
        begins: a file with the state of a run that has taken a step, for a process that joins later; None: the run begins.
        ends: a file for the state after the first step, with which the trial then ends; None: no file.
    """

    asked: TrialRequest = field(default_factory=TrialRequest)
    steps: int = STEPS
    before: Callable[[int], bool] = lambda number: True
    after: Callable[[float, int, float], None] = lambda seconds, batch_size, looked_s: None
    share: int = 1
    of_shards: int = 0
    main: bool = True
    once: Callable[[Callable[[], Any]], Any] = lambda fn: fn()
    tracking: Callable[[Mapping[str, Any]], None] = lambda objects: None
    begins: Path | None = None
    ends: Path | None = None


class Trying(Run):
    """A run of one rank without a cluster. This rank does the work for all ranks itself, and saves and evaluates nothing."""

    def __init__(self, settings: RunSettings, folder: Path, book: Book, plan: TrialPlan) -> None:
        self._book, self._plan = book, plan
        recorder = Recorder(folder / "ring", now_us())
        client = Client(self.rank, "trial", "trial", str(folder / "nobody"), "nowhere:1", recorder)
        client.protocol.name(None, settings.coordinates[0])
        super().__init__(client, recorder, _NoParts(), settings, "127.0.0.1", Home(folder, is_twin=True, work=folder))
        self._loop.attempt = self._attempt
        self._loop.rank = 1  # as only rank 0 reports its data to a run
        self.kept = KeptValues(plan.asked.at)

    def track(self, *, weights: Any = None, **objects: Any) -> TrackedState:
        """See :class:`Run`."""
        self._plan.tracking(objects)
        return super().track(weights=weights, **objects)

    def steps(
        self, state: TrackedState, *, total: int, clip_norm: ClipNorm = None, together: int = 1, flops: float = 0.0
    ) -> Iterator[Step]:  # fmt: skip
        """See :class:`Run`. Code after the loop does not run."""
        self._loop.total, self._loop.flops = total, FlopCount(1.0)
        make = functools.partial(TrialLayout, book=self._book, kept=self.kept)
        settings = dataclasses.replace(self._settings, mesh={})  # this rank has all of the model, and votes alone
        train = self._train_step = TrainStep(state, settings, self._loop.recorder, clip_norm, layout=make)
        view = View(1, (Member(0, 0),), ((0, self.shards),), 0, (), StateId(0, 0), "")
        train.join(Group(1, 0, 1, train.device), view.column_of(Member(0, 0)), 0, StateId(0, 0), False)
        train.contributions.gathered.times = self._plan.share
        if ORDER in self._plan.asked.varied:
            train.duties.mine = train.duties.mine[::-1]
        for number in range(self._found(state), min(total, self._plan.steps)):
            if not self._plan.before(number):
                break
            yield from self._one_step(train, number)
            if self._plan.ends is not None:
                skeleton, tensors = state.flatten()
                torch.save({"skeleton": skeleton, "tensors": tensors}, self._plan.ends)
                break
        raise RunOver

    def _found(self, state: TrackedState) -> int:
        """How many steps the run has taken when this process joins it."""
        if self._plan.begins is None:
            return 0
        found = torch.load(self._plan.begins, weights_only=True)
        state.load(found["skeleton"], found["tensors"])
        self.kept.taken = LATE_BY
        return LATE_BY

    def _one_step(self, train: TrainStep, number: int) -> Iterator[Step]:
        book = self._book
        book.step, book.shard = number, -1
        step = self._loop.step = TrialStep(self._loop, train, number)
        step.book, step.share, step.of_shards = book, self._plan.share, self._plan.of_shards
        begun_s, looked_us = time.perf_counter(), train.contributions.gathered.looked_us
        yield step
        if not step.closed:
            raise LoopError(f"step {number}: the loop body ended without step.commit()")
        if train.device.type == "cuda":
            torch.cuda.synchronize()
        looked_s = 1e-6 * (train.contributions.gathered.looked_us - looked_us)
        self._plan.after(time.perf_counter() - begun_s, step.batch_size, looked_s)

    def _attempt(self) -> None:
        train, step = self._trained, self._loop.attempted
        assert step is not None
        train.body.leave()
        outcome = train.alone()
        if (doubt := outcome.doubt) is not None and not all(map(math.isfinite, step.losses.values())):
            raise LoopError(f"step {step.number}, shard {doubt.shard}: {doubt.why}")
        seed_step(self.seed, step.number)
        train.apply(Apply(outcome))
        self._loop.committed = True
        step.loss, step.grad_norm = outcome.loss, train.figures[GRAD_NORM]
        for fn in step.callbacks:
            fn()
        self.kept.taken = step.number + 1

    # ---- work for all ranks --------------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """See :class:`Run`."""
        return int(RANK in self._plan.asked.varied)

    @property
    def is_main(self) -> bool:
        """See :class:`Run`."""
        return self.rank == 0 and self._plan.main

    @property
    def steps_taken(self) -> int:
        """See :class:`Run`."""
        return self.kept.taken

    def once(self, fn: Callable[[], Any], *, name: str = "") -> Any:
        """See :class:`Run`. This rank runs ``fn``."""
        return self._plan.once(fn)

    def save(self, path: Any, model: Any = None) -> str | None:
        """See :class:`Run`. It writes no file."""
        return self._home.target(str(path))

    def evaluate(self, fn: Callable[[], Mapping[str, float]], *, every: int = 1) -> EvaluationFigures | None:
        """See :class:`Run`. As after a step without an evaluation."""
        return None

    def stop(self, reason: str) -> None:
        """See :class:`Run`. The trial has its own end."""

    def recalled(self, fn: Callable[[Any, int], Any], *, name: str) -> Any:
        """See :class:`Run`. There is no journal."""
        return None

    def once_behind(self, fn: Callable[[Any], Any], *, name: str) -> bool:
        """See :class:`Run`. ``fn`` does not run."""
        return False

    def measure(self, name: str, value: float) -> None:
        """See :class:`Run`. There is no journal."""


class _NoParts:
    """A store whose use is an error."""

    def __getattr__(self, name: str) -> Any:
        raise LoopError(f"a trial saves nothing: {name}")


Attempted = Callable[[TrialRequest, Path | None, Path | None], Trial]
"""One process of a trial: takes the request, and two files, see :class:`TrialPlan`."""


def tried(attempted: Attempted, asked: TrialRequest) -> Trial:
    """Make a trial. That of a process that joins late needs two processes: the first writes the state with which the second begins."""
    if LATE not in asked.varied:
        return attempted(asked, None, None)
    with tempfile.TemporaryDirectory(prefix="fleet-trial-") as folder:
        state = Path(folder, "state.pt")
        before = attempted(TrialRequest(), None, state)
        return attempted(asked, state, None) if state.exists() else before


def attempt(
    load: Callable[[], Train], settings: RunSettings, asked: TrialRequest, begins: Path | None = None, ends: Path | None = None
) -> Trial:  # fmt: skip
    """One process of a trial, from the script's first line to its last step.

    Args:
        load: loads the script and gives the train function, within the run, as on a rank.
        settings: of the run; ``threads_per_rank``, ``seed``, ``shards`` and ``options`` count.
        begins, ends: see :class:`TrialPlan`.
    """
    book, calls, error, step_s = Book(asked.inside, asked.timed), list[Call](), "", list[float]()
    steps = TIMED_STEPS if asked.timed else STEPS
    plan = TrialPlan(asked, steps, after=lambda seconds, size, looked_s: step_s.append(seconds), begins=begins, ends=ends)
    around = Surroundings(asked, book, calls)
    with tempfile.TemporaryDirectory(prefix="fleet-trial-") as folder, around():
        settle(settings)
        run = Trying(settings, Path(folder), book, plan)
        with within(run):
            train = run.kept.train = load()
            around.adopt(getattr(train, "__globals__", {}))
            try:
                play(run, train)
            except LoopError as mistake:
                error = str(mistake)
        threads = torch.get_num_threads()
    timed = {name: seconds / max(1, len(step_s)) for name, seconds in book.seconds.items()}
    return Trial(tuple(book.marks), tuple(calls), error, tuple(step_s[1:]), timed, threads, around.set_threads, run.kept.found)


def alone(settings: RunSettings, shards: int) -> RunSettings:
    """The settings for a trial of one rank without others: it computes all of a shard."""
    mesh = dict.fromkeys(settings.mesh, 1)
    return dataclasses.replace(
        settings, world=1, max_world=0, min_ranks=1, spares=0, shards=shards, replica_size=1, optimizer_sharding="none", steps=0, mesh=mesh
    )


def settle(settings: RunSettings) -> None:
    """Set threads and seed before the script, as :func:`actors.rank.main.run_rank` does."""
    torch.set_num_threads(settings.threads_per_rank)
    seed_all(settings.seed)


def play(run: Run, train: Train) -> None:
    """Run the train function, up to the end of its loop."""
    with contextlib.suppress(RunOver):
        train(run)
        raise LoopError("the train function has returned and took no step. Iterate `for step in run.steps(state, total=...)` to its end.")
