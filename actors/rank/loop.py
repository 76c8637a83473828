"""What a train function is given: ``Run`` and ``Step``. The loop stays a loop.

A loop body runs at least once for each step; what a step does to the state happens exactly once. Nothing of an attempt that was not
committed shows in the next: gradients, random numbers, batches, scaler, scheduler and metrics are as before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsFloat, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from actors.rank.data.feeds import Feeds
from actors.rank.data.sampling import seed_step, seeded_alone
from actors.rank.device import rank_device
from actors.rank.fsdp.engine import FsdpEngine
from actors.rank.fsdp.taken import Unit, mesh_of_one, take_over
from actors.rank.home import Home
from actors.rank.membership.client import Client
from actors.rank.membership.membership import Membership
from actors.rank.once import EvaluationFigures, OneOfAll, name_of
from actors.rank.rank_injector import RankInjector
from actors.rank.rehearsing import rehearsing
from actors.rank.state.saving import PartsPort, Saver, model_state
from actors.rank.state.tracked import TrackedState
from actors.rank.state.tracking import tracked
from actors.rank.state.weights import hollow
from actors.rank.step.engine import Engine
from actors.rank.step.flops import FlopCount
from actors.rank.step.outcome import ReductionOutcome
from actors.rank.step.step import Loop, Step
from actors.rank.telemetry import usage
from actors.rank.telemetry.energy import metered
from actors.rank.telemetry.exchanged import EXCHANGED
from actors.rank.telemetry.recorder import Recorder
from actors.rank.zero1.resharding import Resharding
from actors.rank.zero1.sharded import ShardedEngine
from fleet.errors import FleetError, GroupLost, LoopError, RunOver
from fleet.host.clock import now_us
from fleet.protocol import moves
from fleet.protocol.events import Implausible, Logged
from fleet.protocol.facts import Measurement, Usage
from fleet.protocol.levels import places
from fleet.protocol.moves import Advance, Attempted, Compute, Move, Rehearse
from fleet.protocol.once import BEGIN, END
from fleet.protocol.rank_machine import Moves
from fleet.protocol.records import COMPUTE, FINISH
from fleet.protocol.topology import DIMENSIONS, coordinate
from fleet.protocol.types import StateId, View
from fleet.protocol.vote import Doubt
from fleet.settings.run import RunSettings

log = logging.getLogger("fleet.rank")
T = TypeVar("T")
MEASURE_EVERY_US = 500_000


class NonFiniteError(FleetError):
    """A shard's loss or the gradient is not a finite number, twice in a row: it is the model or the data, not the hardware."""


def rank_of_those_behind(view: View, began: int, step: int, rank: int) -> int:
    """View rank ``rank`` among those that have taken ``step``. The view was entered at step ``began``, which its newcomers have not taken;
    it was published before that, so its ``state`` does not tell."""
    return rank - sum(each < rank for each in view.receivers) if began == step else rank


class Run:
    """One rank's part in a run. Made by Fleet, handed to the train function.

    Attributes:
        options: the ``--set key=value`` pairs of the command line, as text.
        slot: the place in the run that this process fills, from 0 on; a replacement has the slot of the lost one.
        seed: the run's seed. Fleet seeds torch, numpy and ``random`` from it, for each step and micro-batch: do not seed them.
        shards: into how many micro-batches (batch shards) each step is cut, on all ranks together.
        folder: where files of this run belong, on the machine that the run was started on. A twin has a folder of its own.
        is_twin: this is the fault-free run that the other one is compared with. What it does outside of its folder is done twice.
    """

    def __init__(
        self, client: Client, recorder: Recorder, parts: PartsPort, settings: RunSettings, host: str, home: Home | None = None
    ) -> None:  # fmt: skip
        self.options: Mapping[str, str] = settings.options
        self.slot, self.seed, self.shards = client.protocol.slot, settings.seed, settings.shards
        self._client, self._recorder, self._settings = client, recorder, settings
        home = home or Home()
        self.folder, self.is_twin = home.folder, home.is_twin
        self._home, self._parts = home, parts
        self._saver = Saver(client, recorder, parts, places(settings))
        self._membership = Membership(client, recorder, parts, host, settings.timeouts)
        self._membership.carriers |= self._carriers()
        self._rank_machine = self._membership.rank_machine
        self._steps: Moves = self._rank_machine.run()
        self._engine: Engine | None = None
        self._host, self._units = host, tuple[Unit, ...]()
        self._one = OneOfAll(self._membership, recorder)
        self._owed: list[tuple[int, Callable[[], object]]] = []
        self._joined: tuple[View, int] | None = None
        self._measured_us = self._used_us = 0
        feeds = Feeds(self.seed, self.shards, recorder)
        self._loop = Loop(self.seed, client, recorder, self._rank_machine, feeds, self._attempt)
        self._suspect: int | None = None
        self._attempted: Step | None = None
        self._step: Step | None = None
        self._outcome: ReductionOutcome | None = None
        self._mutated_us = 0
        self._concluded = False

    @property
    def generation(self) -> int:
        """Number of the view that this rank is in, or was in last."""
        return self._client.protocol.generation

    @property
    def device(self) -> torch.device:
        """Where this rank trains: its GPU, where ``--gpus-per-rank`` gives it one, and else the CPU. Of several it is the first.

        Raises:
            ConfigError: the rank has a GPU, and this PyTorch cannot use it.
        """
        return rank_device(self._settings.per_rank.gpus)

    @property
    def mesh(self) -> DeviceMesh:
        """What ``fully_shard`` wants: ``fully_shard(block, mesh=run.mesh)``. It has this rank alone, as the others come and go.

        With ``--optimizer-sharding fsdp`` Fleet cuts the model for the ranks that there are; without, each rank keeps all of it. Its
        dimension is ``shard``; where groups of ranks are replicas (``replica_size``) it has two, ``replicate`` and ``shard``.
        """
        return mesh_of_one(self.device, DIMENSIONS if self._settings.replica_ranks > 1 else DIMENSIONS[-1:])

    @property
    def coordinate(self) -> Mapping[str, int]:
        """Where this rank is now among those that train, by dimension: ``{"replicate": 0, "shard": 1}`` is the second rank of the first
        replica. It changes with the view, as ``rank`` does."""
        return coordinate(self.rank, self._settings.optimizer_sharding == "fsdp", self._settings.replica_ranks)

    @property
    def config(self) -> RunSettings:
        """The run's settings."""
        return self._settings

    def track(self, *, weights: str | os.PathLike[str] | None = None, **objects: Any) -> TrackedState:
        """Name what makes up the training state: what a rank hands on to another one, and what checkpoints hold.

        Args:
            weights: a safetensors file, the index of several, or a folder with either: what the modules begin with. They may have been
                built within ``torch.device("meta")`` then; with ``--optimizer-sharding fsdp`` each rank reads the part that it keeps.
            objects: one or more modules, exactly one optimizer, and whatever else has ``state_dict`` and ``load_state_dict``. Tracked
                schedulers and a ``torch.amp.GradScaler`` are stepped by ``commit``. The same names in every run of a script.

        Raises:
            ConfigError: an object has no ``state_dict``, the optimizer cannot be sharded as ``--optimizer-sharding`` asks, a unit of
                ``fully_shard`` is too large for this rank, the weights are those of another model, or something on ``meta`` has none.
        """
        modules = {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}
        optimizers = {name: one for name, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
        self._units = take_over(modules, optimizers)
        if self._units and self._settings.optimizer_sharding != "fsdp" and self.slot == 0:
            log.warning(
                "fully_shard has cut the model in %d units, and each rank has it whole: see --optimizer-sharding fsdp", len(self._units)
            )
        return tracked(objects, self._units, weights, self._settings, lambda: self.device)

    def steps(self, state: TrackedState, *, total: int, clip_norm: float | None = None, flops: float = 0.0) -> Iterator[Step]:
        """Yield steps until ``total`` are committed; the same step again, for the lost shards, when a peer was lost in it.

        Each process rehearses before it is called: the first step it is given is not committed. Code behind the loop runs on the ranks that
        hold the final state, once it is kept. On all others, such as spares, the loop does not end: they leave the train function by a
        ``fleet.errors.RunOver``.

        Args:
            state: from ``track``.
            total: number of optimizer steps of the whole run, at least 1; ``--steps`` replaces it.
            clip_norm: clip the L2 norm of the step's whole gradient to this, inside the commit.
            flops: of the model in a step, forward and backward of all its samples: the report has the MFU, where ``cost.device`` is set; 0:
                PyTorch's counter counts them in one shard, where nothing is compiled.

        Raises:
            FleetError: ``total`` is below 1, there was a loop before, or the loop body misses a call or makes one twice.
            NonFiniteError: a loss or the gradient is not a finite number, and again when it was computed once more.
        """
        total = self._settings.steps or total
        if total < 1:
            raise FleetError(f"total = {total}: a run has at least one step")
        if self._engine is not None:
            raise FleetError("run.steps() was called twice: a run has one loop; give it the number of all steps")
        self._loop.total, self._loop.flops = total, FlopCount(flops)
        self._engine = self._make_engine(state, clip_norm)
        self._recorder.total(total)
        self._client.on_operation = RankInjector(self._engine).operate
        while (move := self._go_on()) is not None:
            match move:
                case Rehearse():
                    yield from self._rehearse()
                case Compute(number):
                    step = self._step = Step(self._loop, self._engine, number)
                    yield step
                    self._recorder.between(False)
                    if not step.closed:
                        raise LoopError(f"step {step.number}: the loop body ended without step.commit()")
        if not self._concluded:
            raise RunOver

    def _go_on(self, value: Any = None) -> Move | None:
        """Carry out what is the rank's own, up to the next move that is the train function's. None: there is no further one."""
        lost: GroupLost | None = None
        while True:
            ended, move = self._membership.resume(self._steps, value, lost)
            if ended:
                self._concluded = move
                return None
            if isinstance(move, Rehearse | Compute | Attempted):
                return move
            value = lost = None
            try:
                value = self._membership.carriers[type(move)](move)
            except GroupLost as error:
                lost = error

    def _make_engine(self, state: TrackedState, clip_norm: float | None) -> Engine:
        if self._settings.optimizer_sharding == "none":
            engine = Engine(state, self._settings, self._recorder, clip_norm)
            self._membership.serve(state, engine, self._loop.total)
            return engine
        sharded = self._make_sharded(state, clip_norm)
        copies, levels = self._settings.optimizer_copies, len(self._settings.domains)
        resharding = Resharding(sharded, self._client.protocol, copies, self._advance, levels, self._settings.replica_ranks)
        self._membership.serve(state, sharded, self._loop.total, resharding)
        return sharded

    def _make_sharded(self, state: TrackedState, clip_norm: float | None) -> ShardedEngine:
        if self._settings.optimizer_sharding == "fsdp":
            called_away = lambda: self._rank_machine.wanted  # noqa: E731
            hollow(state.modules, self.device)
            return FsdpEngine(state, self._settings, self._recorder, clip_norm, self._units, self._host, called_away)
        return ShardedEngine(state, self._settings, self._recorder, clip_norm)

    def _rehearse(self) -> Iterator[Step]:
        """Each process runs the loop body once, on its initial state, and forgets it, before it can be called; ``commit`` says False.

        It would do all for the first time otherwise while everyone waits for it: imports, compilation, memory.
        """
        assert self._engine is not None
        with rehearsing(self._engine, self._loop):
            self._step = Step(self._loop, self._engine, 0)
            yield self._step

    @property
    def rank(self) -> int:
        """Which of the ranks this is that train now, from 0 on; it changes with the view. Before it trains, this is its slot.

        Behind ``commit`` those count that took the step: not who comes at that moment.
        """
        if self._joined is None:
            return self.slot
        view, began = self._joined
        return rank_of_those_behind(view, began, self._here().step, self._loop.rank) if self._loop.committed else self._loop.rank

    @property
    def steps_taken(self) -> int:
        """How many steps the state at hand has taken."""
        state = self._here_or_none()
        return state.step if state is not None else 0

    @property
    def is_main(self) -> bool:
        """True on one rank at a time: slot 0 before the loop, then the first rank of the view. For what may be lost, such as a line of log.

        What must happen, whoever is lost, is for ``once``.
        """
        return self._loop.rank == 0 if self._here_or_none() is not None else self.slot == 0

    def once(self, fn: Callable[[], Any], *, name: str = "") -> Any:
        """Run ``fn()`` on one rank, and return what it returns on all ranks; they wait for it.

        When that rank is lost before ``fn`` has returned, another one runs it instead, so ``fn`` may *begin* more than once. Call it on all
        ranks: before the loop (once in the run), behind the loop (the same), or in the loop after ``commit`` (once for each step).

        Args:
            fn: returns plain data (what JSON can hold, at most 64 KiB), or nothing.
            name: tells two functions apart that are made in the same line of code; the same on all ranks.

        Returns:
            What ``fn`` returned, as JSON gives it back. None in an attempt at a step that is not committed, where ``fn`` does not run.

        Raises:
            FleetError: the result is no plain data, or too large; or it is called in a step before ``commit``.
        """
        place = self._place()
        return None if place is None else self._one.do(self._one.key(place, name or name_of(fn)), lambda before: self._alone(fn))

    def save(self, path: str | os.PathLike[str], model: Any = None) -> str | None:
        """Write the model to one file, once, whole or not at all: call it as ``once``, on all ranks.

        Args:
            path: ``.safetensors``, or anything else for what ``torch.load(FILE, weights_only=True)`` reads; a path, or a URL of any store
                that fsspec knows. A relative path begins in the working directory; a twin has one of its own, and saves nowhere else.
            model: a module, or a mapping of names to tensors. By default the tracked module; of several one mapping for each name.

        Returns:
            Where it lies: an absolute path or the URL, on all ranks. None where ``once`` does nothing.

        Raises:
            OSError: it cannot be written.
            FleetError: there is no model to write.
        """
        state = self._engine.state if self._engine is not None else None
        target = self._home.target(os.fspath(path))

        def export() -> str:
            with self._trained.whole() if self._engine is not None else contextlib.nullcontext():
                return self._parts.export(target, model_state(state, model))

        where: str | None = self.once(export, name=f"save {target}")
        return where

    def evaluate(self, fn: Callable[[], Mapping[str, float]], *, every: int = 1) -> EvaluationFigures | None:
        """Once every ``every`` committed steps, ``fn()`` runs on one rank; its figures go to the journal, and to all ranks.

        Call it on all ranks, after ``commit``. The others go on, and wait in their next reduction, or when they look at a figure. It may
        take long: no rank is taken for hung meanwhile.

        Args:
            fn: name -> number, such as ``{"val_loss": 1.23}``. When its rank is lost before it has returned, another one runs it.
            every: number of steps from one evaluation to the next; the first is after step ``every``.

        Returns:
            The figures, which can be looked at on every rank. None after other steps.
        """
        self._check_closed("run.evaluate()")
        if not self._loop.committed or self._here().step % every:
            return None
        key = self._one.key(self._here(), name_of(fn))
        figures = EvaluationFigures(lambda: self._one.do(key, lambda before: self._judged(self._alone(fn), before)))
        self._owe(figures.fetch)
        return figures

    def once_behind(self, fn: Callable[[Any], Any], *, name: str) -> bool:
        """Once this step is committed, ``fn`` runs on one rank, as in ``once``; the others go on, and nobody is told what it returns.

        Call it on all ranks, as often as you like, anywhere. In a step that will be repeated it does nothing: the loop body comes there
        again. Before the loop and behind it, it is ``once``. Only when all ranks are lost together, right after the commit, is it left out.

        Args:
            fn: is given what it returned the last time before in this run, None the first time; returns plain data.
            name: tells it apart from others; the same on all ranks.

        Returns:
            Whether ``fn`` may still be called here.
        """
        if self._step is not None and not self._step.closed:
            self._step.behind.append(lambda: self.once_behind(fn, name=name))
            return True
        if (place := self._place()) is None:
            return False
        key = self._one.key(place, name)
        if isinstance(place, StateId):
            return self._owe(lambda: self._one.do(key, fn))
        self._one.do(key, fn)
        return False

    def measure(self, name: str, value: float) -> None:
        """Note a figure of the state at hand in the run's journal; of what is not finite nothing is noted."""
        self._measure({name: value})

    # ---- inside --------------------------------------------------------------------------------------------------------------------------

    def _here(self) -> StateId:
        state = self._client.protocol.state
        assert state is not None
        return state

    def _measure(self, figures: Mapping[str, SupportsFloat]) -> None:
        if (here := self._here_or_none()) is not None:
            member, values = self._client.protocol.member, {name: float(value) for name, value in figures.items()}
            self._client.say(*(Measurement(member, here, name, value) for name, value in values.items() if math.isfinite(value)))

    def _here_or_none(self) -> StateId | None:
        return self._client.protocol.state

    def _place(self) -> str | StateId | None:
        """Where in the run this is, for what is done once. None: nowhere, as this attempt at a step is a rehearsal, or will be repeated."""
        if self._client.protocol.concluded:
            return END
        if self._engine is None:
            return BEGIN
        self._check_closed("run.once() and run.save()")
        return self._here() if self._loop.committed else None

    def _check_closed(self, call: str) -> None:
        if self._step is not None and not self._step.closed:
            raise LoopError(f"step {self._step.number}: {call} stands before step.commit(). Put it behind, where the step is done.")

    def _owe(self, do: Callable[[], object]) -> bool:
        """The first rank that is at this step does it, now. The others remember it while they stand here: should that rank be lost before
        it is done, one of them does it before anybody takes another step. Whether this is one of them."""
        step = self._here().step
        self._owed = [each for each in self._owed if each[0] == step]
        if self.rank == 0:
            do()
            return False
        self._owed.append((step, do))
        return True

    def _pay(self, view: View) -> None:
        """ViewJoined in another view: the first that was in the step, and so knows what is owed, does that. Twice begun is once done."""
        here = self._here().step
        owed, self._owed = [each for each in self._owed if each[0] == here], []
        if rank_of_those_behind(view, here, here, self._loop.rank):
            self._owed = owed
            return
        for _, do in owed:
            do()

    def _alone(self, fn: Callable[[], T]) -> T:
        """What ``fn`` gives, which runs on this rank alone. In the loop all is left as on the other ranks: what is tracked, the modes of
        modules (``model.eval()``), and the random generators, which are the same for ``fn`` on whichever rank it runs."""
        if self._engine is None or self._client.protocol.concluded:
            return fn()
        parts = [part for module in self._engine.state.modules.values() for part in module.modules()]
        modes = [part.training for part in parts]
        try:
            with self._client.alone(), seeded_alone(self.seed, self._here().step):
                return self._engine.body.during(fn)
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode

    def _judged(self, figures: Mapping[str, float], before: Any) -> dict[str, Any]:
        for name, value in figures.items():
            self.measure(name, float(value))
        return EvaluationFigures.judged(figures, before)

    def close(self) -> None:
        """The train function has returned. Returns when the run is over. Raises LoopError when it has not come to the end of its loop."""
        protocol = self._client.protocol
        if not protocol.concluded and protocol.released is None:
            raise LoopError(self._unfinished())
        self._membership.carry(self._rank_machine.close())

    def _unfinished(self) -> str:
        use = "Iterate `for step in run.steps(state, total=...)` to its end: it ends by itself after the last step."
        if self._engine is None:
            return f"the train function has returned and took no step. {use}"
        here = self._here_or_none()
        return f"the train function has returned at step {here.step if here else 0} of {self._loop.total}, before the loop's end. {use}"

    # ---- moves ---------------------------------------------------------------------------------------------------------------------------

    def _carriers(self) -> dict[type[Move], Callable[[Any], Any]]:
        """How each move of the loop is carried out."""
        return {
            moves.Hold: self._hold,
            moves.Reset: lambda move: self._trained.reset(),
            moves.AssignShards: self._share,
            moves.ViewJoined: lambda move: self._pay(move.view),
            moves.Reduce: self._reduce,
            moves.CastVote: lambda move: self._trained.words(),
            moves.Repeat: self._repeat,
            moves.Apply: self._apply,
            moves.Advance: self._follow,
            moves.StepCommitted: self._finish_step,
            moves.Expect: lambda move: self._trained.expect(),
            moves.Save: self._save,
            moves.Digest: self._digest,
        }

    @property
    def _trained(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _attempt(self, step: Step) -> ReductionOutcome | None:
        """Reduce and apply one step. None when the loop body has to run again first: for shards of a lost rank, or from another state."""
        self._attempted, self._outcome = step, None
        self._go_on()
        self._recorder.between(self._loop.committed)
        return self._outcome or self._trained.outcome_of(step.number)

    def _hold(self, move: moves.Hold) -> None:
        self._trained.body.leave()
        self._trained.hold()

    def _share(self, move: moves.AssignShards) -> None:
        self._membership.joined()
        view, arriving = move.view, self._rank_machine.arriving
        here = arriving.state if arriving is not None else self._here()
        self._joined, self._loop.rank = (view, here.step), view.rank_of(self._client.protocol.member)
        self._trained.join(self._membership.group, view, self._loop.rank, here, move.begun)
        if arriving is None:
            self._recorder.switch(COMPUTE)
        self._recorder.place(view.generation, here.history, here.step)

    def _reduce(self, move: moves.Reduce) -> ReductionOutcome:
        if not move.early:
            return self._trained.reduce(move.offer)
        self._recorder.paused = True  # whatever it does meanwhile, it is being restored
        try:
            return self._trained.reduce(move.offer, early=True)
        finally:
            self._recorder.paused = False

    def _repeat(self, move: moves.Repeat) -> None:
        """All ranks repeat the step together, once: a flipped bit goes away, a wrong model does not."""
        doubt, step = move.doubt, self._attempted
        assert step is not None
        if self._suspect == step.number and doubt.hopeless:
            raise NonFiniteError(f"step {step.number}, shard {doubt.shard}: {doubt.why}, and again when it was computed once more")
        self._suspect = step.number
        self._report(doubt.why, doubt)
        self._trained.repeat()

    def _report(self, why: str, doubt: Doubt | None = None) -> None:
        if self._loop.rank == 0:
            shard = -1 if doubt is None else doubt.shard
            owner = self._trained.owner(shard)
            computed_by = self._rank_machine.view.members[owner] if owner >= 0 else None
            self._client.say(Implausible(self._client.protocol.member, self._here(), shard, computed_by, why, accepted=doubt is None))

    def _apply(self, move: moves.Apply) -> None:
        assert isinstance(move.reduced, ReductionOutcome)
        if why := self._trained.remark():
            self._report(why)
        self._outcome = move.reduced
        self._mutate(self._trained.apply)

    def _follow(self, move: moves.Advance) -> None:
        assert isinstance(self._engine, ShardedEngine)
        self._mutate(self._engine.advance)

    def _mutate(self, apply: Callable[[], None]) -> None:
        assert self._attempted is not None
        self._saver.settle()
        self._mutated_us = self._recorder.switch(COMPUTE)
        seed_step(self.seed, self._attempted.number)
        apply()

    def _note_commit(self) -> None:
        self._membership.settled()
        self._recorder.commit(max(self._mutated_us, now_us()))
        self._loop.committed = True

    def _finish_step(self, move: moves.StepCommitted) -> None:
        step, reduced = self._attempted, move.reduced
        assert step is not None and isinstance(reduced, ReductionOutcome)
        self._note_commit()
        self._trained.finish(lambda: self._report_step(step, reduced.loss))

    def _advance(self) -> None:
        """Others took the step that this rank was about to take when its view broke: it takes it too."""
        step, engine = self._attempted, self._engine
        assert step is not None and isinstance(engine, ShardedEngine)
        before = self._recorder.code
        self._membership.carry(self._rank_machine.take_step(Advance()))
        self._note_commit()
        engine.afterwards(lambda: self._report_step(step, engine.loss))
        self._recorder.switch(before)

    def _report_step(self, step: Step, loss: float) -> None:
        for fn in step.callbacks:
            with self._trained.unread():
                fn()
        last = step.number + 1 == self._loop.total
        self._report_used(last)
        if self._loop.rank == 0 and (last or now_us() - self._measured_us > MEASURE_EVERY_US):
            self._measured_us = now_us()
            counted = self._loop.flops.figures(self.shards, self._trained.device, last)
            self._measure({"loss": loss, **self._trained.figures, **counted, **step.figures})
        if (log := self._trained.log).some and (last or log.due):
            self._client.say(Logged(self._client.protocol.member, self._here(), *log.reported))

    def _report_used(self, last: bool) -> None:
        if last or now_us() - self._used_us > usage.every_us(self._settings.world):
            self._used_us = now_us()
            self._client.say(Usage(self._client.protocol.member, *usage.used(), *EXCHANGED.counts, usage.FETCHED.total, *metered()))

    def _save(self, move: moves.Save) -> None:
        self._saver.begin(move.request, self._here(), self._rank_machine.view, self._trained.share())
        if move.still:
            self._saver.settle()

    def _digest(self, move: moves.Digest) -> str:
        """Wait at the barrier until all hold the last state, and it is kept."""
        self._trained.body.leave()
        self._saver.settle()
        self._recorder.switch(FINISH)
        seed_step(self.seed, self._here().step)  # as the next step would: whoever came after the last commit has drawn no numbers in it
        return self._trained.digest(self._here().step)
