"""``Run``, the argument of a train function. The loop stays a loop.

A loop body runs at least once for each step; a step changes the state exactly once. An attempt that was not committed leaves no trace in
the next: gradients, random numbers, batches, scaler, scheduler and metrics are as before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from actors.rank.data.feeds import Feeds
from actors.rank.data.sampling import seed_step, seeded_alone
from actors.rank.device import rank_device
from actors.rank.fsdp.taken import mesh_of_one, take_over
from actors.rank.home import Home
from actors.rank.membership.client import Client
from actors.rank.membership.membership import Membership
from actors.rank.membership.process_group import GroupBroken, Interrupted
from actors.rank.membership.view_groups import Meeting
from actors.rank.mesh.run_mesh import RunMesh
from actors.rank.once import EvaluationFigures, OneOfAll, name_of, words_of
from actors.rank.rank_injector import RankInjector
from actors.rank.rehearsing import rehearsing
from actors.rank.state.saving import PartsPort, Saver, model_state
from actors.rank.state.tracked import TrackedState
from actors.rank.state.tracking import tracked
from actors.rank.state.weights import hollow
from actors.rank.step.contributions import InView
from actors.rank.step.flops import FlopCount
from actors.rank.step.reports import Reports
from actors.rank.step.shard_state import ShardState
from actors.rank.step.step import Loop, Step
from actors.rank.step.train_step import TrainStep
from actors.rank.step.update import ClipNorm
from actors.rank.telemetry.garbage import Garbage
from actors.rank.telemetry.recorder import Recorder
from actors.rank.zero1.resharding import Resharding
from fleet.errors import ConfigError, FleetError, LoopError, RunOver
from fleet.protocol import moves
from fleet.protocol.draws import left_out_of
from fleet.protocol.levels import places
from fleet.protocol.moves import Advance, Attempted, Compute, Move, Rehearse
from fleet.protocol.once import BEGIN, END
from fleet.protocol.records import COMPUTE, FINISH
from fleet.protocol.topology import DIMENSIONS, coordinate
from fleet.protocol.types import StateId, View, rank_of_those_behind
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from actors.rank.mesh.pipe import LossFn, Pipeline

log = logging.getLogger("fleet.rank")
T = TypeVar("T")
BREAK = "Leave it where a step is committed, `if step.commit() and ...: break`, or say run.stop(reason), which may stand in any attempt."


class Run:
    """One rank's part in a run. Fleet makes it and gives it to the train function.

    Attributes:
        options: the ``--set key=value`` pairs of the command line, as text.
        slot: the place in the run that this process fills, from 0 on; a replacement has the slot of the lost process.
        seed: the run's seed. Fleet seeds torch, numpy and ``random`` from it, for each step and micro-batch: do not seed them.
        shards: into how many micro-batches (batch shards) each step is cut, on all ranks together.
        folder: the folder of this run's files, on the machine where the run was started. A twin has a folder of its own.
        is_twin: this is the fault-free run with which the other run is compared. Work outside of ``folder`` happens in both runs.
    """

    def __init__(
        self, client: Client, recorder: Recorder, parts: PartsPort, settings: RunSettings, host: str, home: Home | None = None
    ) -> None:  # fmt: skip
        self.options: Mapping[str, str] = settings.options
        self.slot, self.seed, self.shards = client.protocol.slot, settings.seed, settings.shards
        self._settings, self._parts, self._home = settings, parts, home or Home()
        self.folder, self.is_twin = self._home.folder, self._home.is_twin
        self._saver = Saver(client, recorder, parts, places(settings))
        self._membership = Membership(client, recorder, parts, host, settings.timeouts)
        self._mesh = RunMesh(settings, client, lambda: self.device)
        self._train_step: TrainStep | None = None
        self._one = OneOfAll(self._membership, recorder)
        self._joined: tuple[View, int] | None = None
        feeds, rank_machine = Feeds(self.seed, self.shards, recorder, left_out_of(settings.left_out)), self._membership.rank_machine
        attempt = functools.partial(self._membership.carry, rank_machine.run(), (Rehearse, Compute, Attempted))
        self._loop = Loop(self.seed, client, recorder, rank_machine, feeds, attempt, Garbage(recorder))
        self._reports = Reports(self._loop, settings, self._membership, self._saver)

    @property
    def generation(self) -> int:
        """Number of this rank's present or last view."""
        return self._loop.client.protocol.generation

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU, the first of several, where ``--gpus-per-rank`` gives it one; else the CPU.

        Raises:
            ConfigError: the rank has a GPU, and this PyTorch cannot use it.
        """
        return rank_device(self._settings.per_rank.gpus)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh for ``fully_shard``: ``fully_shard(block, mesh=run.mesh)``. It has this rank alone, as the others come and go.

        With ``--optimizer-sharding fsdp`` Fleet cuts the model for the present ranks; without, each rank keeps all of it. Its dimension is
        ``shard``; where groups of ranks are replicas (``replica_size``) it has two, ``replicate`` and ``shard``.

        With ``--mesh tensor=2``, ``run.mesh["tensor"]`` is the mesh of the two ranks that compute a shard together. A spare waits here
        until it is called, as for :attr:`coordinate`. Raises RunOver: the run ends meanwhile.
        """
        if self._mesh.axes:
            return self._mesh.device_mesh
        return mesh_of_one(self.device, DIMENSIONS if self._settings.replica_ranks > 1 else DIMENSIONS[-1:])

    @property
    def coordinate(self) -> Mapping[str, int]:
        """This rank's place among the training ranks, by dimension: ``{"replicate": 0, "shard": 1}`` is the second rank of the first
        replica.
        It changes with the view, as ``rank`` does. With ``--mesh`` it is the place there, such as ``{"tensor": 1}``, and never changes."""
        if self._mesh.axes:
            return dict(self._mesh.coordinate)
        return coordinate(self.rank, self._settings.optimizer_sharding == "fsdp", self._settings.replica_ranks)

    def pipeline(
        self, layers: Sequence[torch.nn.Module], loss_fn: LossFn, *, inputs: Callable[[Any], Any], begins: Sequence[int] = ()
    ) -> Pipeline:  # fmt: skip
        """Cut a model into the stages of ``--mesh stage=N``: this rank keeps the layers of its stage. See ``Pipeline`` for the
        arguments.

        Call it before the optimizer is made, track the whole model, and call ``pipe.step`` in the place of the loop over ``step.batches``.
        A spare waits here until it is called. Raises ConfigError: the run has no stages, or the model has fewer layers.
        """
        return self._mesh.pipe(layers, loss_fn, inputs, begins)

    @property
    def config(self) -> RunSettings:
        """The run's settings."""
        return self._settings

    def track(self, *, weights: str | os.PathLike[str] | None = None, **objects: Any) -> TrackedState:
        """Name the objects of the training state: a rank hands their state on to another rank, and checkpoints contain it.

        Args:
            weights: the modules' first weights: a safetensors file, the index of several, or a folder with either. The modules may then be
                built within ``torch.device("meta")``; with ``--optimizer-sharding fsdp`` each rank reads the part that it keeps.
            objects: one or more modules, one or more optimizers, and other objects with ``state_dict`` and ``load_state_dict``. ``commit``
                steps tracked schedulers and a ``torch.amp.GradScaler``. Use the same names in each run of a script.

        Raises:
            ConfigError: an object has no ``state_dict``, or an optimizer has a parameter of no tracked module. The optimizer cannot be
                sharded as ``--optimizer-sharding`` asks, or a unit of ``fully_shard`` is too large for this rank. The weights are those of
                another model, or a tensor on ``meta`` has none.
        """
        for each in objects.values():
            if isinstance(each, ShardState):
                each.begin(self.shards)
        modules = {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}
        optimizers = {name: one for name, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
        units = take_over(modules, optimizers)
        if units and self._settings.optimizer_sharding != "fsdp" and self.slot == 0:
            log.warning("fully_shard has cut the model in %d units, and each rank has it whole: see --optimizer-sharding fsdp", len(units))
        self._mesh.check(modules)
        return tracked(objects, units, weights, self._settings, lambda: self.device, self._mesh.stages)

    def steps(
        self, state: TrackedState, *, total: int, clip_norm: ClipNorm = None, together: int = 1, flops: float = 0.0
    ) -> Iterator[Step]:  # fmt: skip
        """Yield steps until ``total`` are committed; the same step again, for the lost shards, when a peer was lost in it.

        Each process rehearses before it trains: its first step is not committed. Code after the loop runs on the ranks that hold the final
        state, once that is kept. On all others, such as spares, the loop does not end: they leave the train function by a
        ``fleet.errors.RunOver``.

        Args:
            state: from ``track``.
            total: number of optimizer steps of the whole run, at least 1; ``--steps`` replaces it.
            clip_norm: the commit clips the L2 norm of the step's whole gradient to this, over all optimizers that take the step. Or by
                optimizer, ``{optimizer: 1.0}``: it clips each optimizer's gradient by itself, and not that of others.
            together: each group of so many successive steps belongs together: no checkpoint, stop or end comes within a group.
            flops: of the model in a step, forward and backward of all its samples. With them and ``cost.device`` the report has the MFU. 0:
                PyTorch's counter counts them in one shard, if no part of the loop is compiled.

        Raises:
            FleetError: ``total`` is below 1, there was a loop before, or the loop body omits a call or makes one twice.
            ConfigError: ``total`` is no multiple of ``together``, or ``clip_norm`` names an optimizer that is not tracked.
            NonFiniteError: a loss or the gradient is not a finite number, and is not when it is computed once more.
        """
        total = self._settings.steps or total
        if total < 1:
            raise FleetError(f"total = {total}: a run has at least one step")
        if together < 1 or total % together:
            way_out = f"Take a multiple of {max(together, 1)} steps: total, or --steps."
            raise ConfigError("together", together, f"the {total} steps of the run do not divide into such groups", way_out)
        if self._train_step is not None:
            raise FleetError("run.steps() was called twice: a run has one loop; give it the number of all steps")
        self._loop.total, self._loop.flops = total, FlopCount(flops)
        train = self._train_step = self._make_train_step(state, clip_norm, together)
        self._membership.carriers |= self._carriers(train)
        self._loop.recorder.total(total)
        self._loop.client.on_operation = RankInjector(train).operate
        try:
            with self._loop.garbage:
                while isinstance(move := self._loop.attempt(), Rehearse | Compute | Attempted):
                    match move:
                        case Rehearse():
                            yield from self._rehearse(train)
                            self._loop.garbage.settle()
                        case Compute(number):
                            yield self._begin_step(train, number)
                            self._end_step()
        except GeneratorExit:  # by ``break``, which the next call handles; or by an exception, which the process reports
            self._loop.left = True
            raise
        if not move:  # False: the code after the loop does not run on this rank
            raise RunOver

    def _begin_step(self, train: TrainStep, number: int) -> Step:
        self._one.begin_body()
        step = self._loop.step = Step(self._loop, train, number)
        return step

    def _end_step(self) -> None:
        step = self._loop.step
        self._loop.recorder.between(False)
        if step is not None and not step.closed and not self._loop.client.protocol.ends_here:
            raise LoopError(f"step {step.number}: the loop body ended without step.commit()")

    def _make_train_step(self, state: TrackedState, clip_norm: ClipNorm, together: int) -> TrainStep:
        if self._settings.optimizer_sharding == "fsdp":
            hollow(state.modules, self.device)
        train = TrainStep(
            state,
            self._settings,
            self._loop.recorder,
            clip_norm,
            observer=self._reports,
            layout=self._mesh.layout if self._mesh.divides else None,
            host=self._membership.host,
            called_away=lambda: self._loop.rank_machine.wanted,
            outside=lambda: self._loop.rank_machine.outside,
            alone=lambda: self._loop.client.protocol.alone,
        )
        self._membership.serve(state, train, self._loop.total, self._resettling(train), together)
        return train

    def _resettling(self, train: TrainStep) -> Meeting | None:
        settings, protocol = self._settings, self._loop.client.protocol
        if settings.spread:
            levels = len(settings.domains)
            return Resharding(train, protocol, settings.optimizer_copies, self._advance, levels, settings.replica_ranks).exchange
        return self._mesh.meeting(train, self._advance) if self._mesh.divides else None

    def _rehearse(self, train: TrainStep) -> Iterator[Step]:
        """Before it joins a view, each process runs the loop body once, on its initial state, and drops the result. ``commit`` returns
        False.

        Otherwise all ranks would wait while it imports, compiles and allocates for the first time.
        """
        with rehearsing(train, self._loop):
            step = self._loop.step = Step(self._loop, train, 0)
            yield step

    @property
    def rank(self) -> int:
        """This rank's number among the training ranks, from 0 on; it changes with the view. Before it trains, this is its slot.

        After ``commit`` only ranks that took the step count, not ranks that join at that moment.
        """
        if self._joined is None:
            return self.slot
        view, began = self._joined
        return rank_of_those_behind(view, began, self._here().step, self._loop.rank) if self._loop.committed else self._loop.rank

    @property
    def steps_taken(self) -> int:
        """How many steps the current state has taken."""
        state = self._loop.client.protocol.state
        return state.step if state is not None else 0

    @property
    def is_main(self) -> bool:
        """True on one rank at a time: slot 0 before the loop, then the first rank of the view. For work that may be lost, such as a log
        line.

        Use ``once`` for work that must be done even if a rank is lost.
        """
        return self._loop.rank == 0 if self._loop.client.protocol.state is not None else self.slot == 0

    def once(self, fn: Callable[[], Any], *, name: str = "") -> Any:
        """Run ``fn()`` on one rank, and return its result on all ranks, which wait for it.

        When that rank is lost before ``fn`` has returned, another one runs it instead, so ``fn`` may *begin* more than once. Call it on all
        ranks: before the loop (once in the run), after the loop (the same), or in the loop after ``commit`` (once for each step).

        Args:
            fn: returns plain data (that JSON can hold, at most 64 KiB), or None.
            name: distinguishes two functions of the same line of code; the same on all ranks.

        Returns:
            The result of ``fn``, after a round trip through JSON. None in an attempt that is not committed, where ``fn`` does not run.

        Raises:
            FleetError: the result is no plain data, or too large; or the call is in a step before ``commit``.
        """
        place = self._place()
        return None if place is None else self._one.do(self._one.key(place, name or name_of(fn)), lambda before: self._alone(fn))

    def save(self, path: str | os.PathLike[str], model: Any = None) -> str | None:
        """Write the model to one file, once, whole or not at all: call it as ``once``, on all ranks.

        Args:
            path: a path, or a URL of any store that fsspec knows. With the ending ``.safetensors`` it is such a file, else a file for
                ``torch.load(FILE, weights_only=True)``. A relative path begins in the working directory. A twin has a working directory of
                its own, and saves only there.
            model: a module, or a mapping of names to tensors. By default the tracked module; of several modules a mapping for each name.

        Returns:
            The place of the file, on all ranks: an absolute path or the URL. None where ``once`` does not run its function.

        Raises:
            OSError: it cannot be written.
            FleetError: there is no model to write.
        """
        state = self._train_step.state if self._train_step is not None else None
        target = self._home.target(os.fspath(path))
        given, over = functools.partial(model_state, state, model), self._loop.client.protocol.concluded
        model_of = self._mesh.whole(given, over=over) if self._mesh.divides and self._place() is not None else given
        if model_of is None:
            return target

        def export() -> str:
            with self._trained.layout.readable() if self._train_step is not None else contextlib.nullcontext():
                return self._parts.export(target, model_of())

        where: str | None = self.once(export, name=f"save {target}")
        return where

    def evaluate(self, fn: Callable[[], Mapping[str, float]], *, every: int = 1) -> EvaluationFigures | None:
        """Once every ``every`` committed steps, ``fn()`` runs on one rank; its figures go to the journal, and to all ranks.

        Call it on all ranks, after ``commit``, or before ``step.batches`` of the next step. The other ranks go on, and wait in their next
        reduction, or when they read a figure. ``fn`` may take long: no rank counts as hung meanwhile.

        Args:
            fn: returns name -> number, such as ``{"val_loss": 1.23}``. When its rank is lost before it has returned, another rank runs it.
            every: number of steps from one evaluation to the next; the first is after step ``every``.

        Returns:
            The figures, which each rank can read. None after other steps.
        """
        here = self._between("run.evaluate()")
        if here is None or here.step == 0 or here.step % every:
            return None
        key = self._one.key(here, name_of(fn))
        found = self._mesh.evaluated(functools.partial(self._alone, fn))
        if found is None:
            return None
        figures = EvaluationFigures(lambda: self._one.do(key, lambda before: self._judged(found(), before)))
        self._owe(figures.fetch)
        return figures

    def stop(self, reason: str) -> None:
        """End the run here: the current state is its last one. It is kept, the code after the loop runs, and the run is completed.

        Call it on all ranks at the same step: after ``commit``, or before ``step.batches`` of the next step. No further step is taken.
        In an attempt that will be repeated it has no effect, as the loop body comes there again.

        Args:
            reason: for people, at most 500 characters; the journal and the report have it.

        Raises:
            LoopError: the call is before the loop, after it, or within a step; or another rank goes on from here.
            ConfigError: there is no reason, or it is too long.
        """
        words = words_of(reason)
        if self._train_step is None or self._loop.client.protocol.concluded:
            way_out = "Leave out the loop, or return from the train function." if self._train_step is None else "The run ends by itself."
            raise LoopError(f"run.stop({words!r}) stands outside of the loop over run.steps. {way_out}")
        if self._between("run.stop()") is not None:
            self._membership.carry(self._loop.rank_machine.end(words))

    def recalled(self, fn: Callable[[Any, int], Any], *, name: str) -> Any:
        """Run ``fn(its last result in this run, steps taken)`` on one rank; all ranks get the result.

        Call it where ``evaluate`` may be called. The journal keeps the result: a resume continues with it. A rollback drops later results.

        Args:
            fn: gets None the first time; returns plain data, as for ``once``.
            name: distinguishes it from others; the same on all ranks.

        Returns:
            What ``fn`` returned. None in an attempt at a step that is not committed, where ``fn`` does not run.
        """
        here = self._between(name)
        return None if here is None else self._one.do(self._one.key(here, name), lambda before: fn(before, here.step))

    def once_behind(self, fn: Callable[[Any], Any], *, name: str) -> bool:
        """Once this step is committed, ``fn`` runs on one rank, as in ``once``. The others go on, and no rank gets the result.

        Call it on all ranks, any number of times, anywhere. In a step that will be repeated it has no effect: the loop body comes there
        again. Before and after the loop it is the same as ``once``. If all ranks are lost together right after the commit, ``fn`` does not
        run.

        Args:
            fn: gets its last result in this run, None the first time; returns plain data.
            name: distinguishes it from others; the same on all ranks.

        Returns:
            Whether ``fn`` may still be called here.
        """
        if (step := self._loop.step) is not None and not step.closed:
            step.behind.append(lambda: self.once_behind(fn, name=name))
            return True
        if (place := self._place()) is None:
            return False
        key = self._one.key(place, name)
        if isinstance(place, StateId):
            return self._owe(lambda: self._one.do(key, fn))
        self._one.do(key, fn)
        return False

    def measure(self, name: str, value: float) -> None:
        """Note a figure of the current state in the run's journal, if it is finite."""
        self._reports.measure({name: value})

    # ---- inside --------------------------------------------------------------------------------------------------------------------------

    def _here(self) -> StateId:
        state = self._loop.client.protocol.state
        assert state is not None
        return state

    def _place(self) -> str | StateId | None:
        """The place in the run, for work that is done once. None: this attempt at a step is a rehearsal, or will be repeated."""
        self._settle_left()
        if self._loop.client.protocol.concluded:
            return END
        if self._train_step is None:
            return BEGIN
        self._check_closed("run.once() and run.save()")
        return self._here() if self._loop.committed else None

    def _between(self, call: str) -> StateId | None:
        """The state between two steps, which all ranks hold there. None in a rehearsal, and in an attempt that will be repeated.

        Raises:
            LoopError: ``call`` stands within a step.
        """
        step = self._loop.step
        if step is None or self._loop.rehearsing:
            return None
        if step.closed:
            return self._here() if self._loop.committed else None
        if step.begun:
            raise LoopError(f"step {step.number}: {call} stands within the step. Put it after step.commit(), or before step.batches().")
        return self._here()

    def _settle_left(self) -> None:
        """The loop was left by ``break``: the run ends with the step that was committed there, as by ``stop``."""
        loop, protocol = self._loop, self._loop.client.protocol
        if not loop.left or protocol.released is not None:
            return
        step, loop.left = loop.step, False
        if not protocol.ends_here:
            if step is None or loop.rehearsing or not (step.closed and loop.committed):
                where = "its rehearsal" if step is None or loop.rehearsing else f"an attempt at step {step.number} that is not committed"
                raise LoopError(f"the loop was left by break in {where}. {BREAK}")
            if self._here().step < loop.total:
                self._membership.carry(loop.rank_machine.end("it was left by break"))
        while isinstance(move := loop.attempt(), Attempted):
            pass
        if isinstance(move, Compute):
            raise FleetError(f"the loop was left by break, and the run has gone back to step {move.step}. {BREAK}")
        if not move:
            raise RunOver

    def _check_closed(self, call: str) -> None:
        if (step := self._loop.step) is not None and not step.closed:
            raise LoopError(f"step {step.number}: {call} stands before step.commit(). Put it after that, where the step is done.")

    def _owe(self, do: Callable[[], object]) -> bool:
        """See :meth:`OneOfAll.owe`."""
        return self._one.owe(self._here().step, self.rank == 0, do)

    def _pay(self, move: moves.ViewJoined) -> None:
        """See :meth:`OneOfAll.pay`."""
        here = self._here().step
        self._one.pay(here, rank_of_those_behind(move.view, here, here, self._loop.rank) == 0)

    def _alone(self, fn: Callable[[], T]) -> T:
        """Run ``fn`` on this rank alone, and return its result.

        In the loop it leaves tracked objects, modes of modules (``model.eval()``) and random generators as on the other ranks. ``fn`` gets
        the same random numbers on any rank.
        """
        if self._train_step is None or self._loop.client.protocol.concluded:
            return fn()
        parts = [part for module in self._train_step.state.modules.values() for part in module.modules()]
        modes = [part.training for part in parts]
        try:
            with self._loop.client.alone(), seeded_alone(self.seed, self._here().step):
                return self._train_step.body.during(fn)
        except Interrupted as error:
            raise GroupBroken(str(error), self.generation) from error
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode

    def _judged(self, figures: Mapping[str, float], before: Any) -> dict[str, Any]:
        for name, value in figures.items():
            self.measure(name, float(value))
        return EvaluationFigures.judged(figures, before, self._here().step)

    def close(self) -> None:
        """The train function has returned: wait for the end of the run. Raises LoopError when the loop has not come to its end."""
        protocol = self._loop.client.protocol
        self._settle_left()
        if not protocol.concluded and protocol.released is None:
            raise LoopError(self._unfinished())
        self._membership.carry(self._loop.rank_machine.close())

    def _unfinished(self) -> str:
        use = "Iterate `for step in run.steps(state, total=...)` to its end: it ends by itself after the last step."
        if self._train_step is None:
            return f"the train function has returned and took no step. {use}"
        here = self._loop.client.protocol.state
        return f"the train function has returned at step {here.step if here else 0} of {self._loop.total}, before the loop's end. {use}"

    # ---- moves ---------------------------------------------------------------------------------------------------------------------------

    def _carriers(self, train: TrainStep) -> dict[type[Move], Callable[[Any], Any]]:
        """By kind of move of the loop, the function that carries it out."""
        return {
            moves.Hold: lambda move: train.hold(),
            moves.Reset: lambda move: train.reset(),
            moves.AssignShards: self._share,
            moves.ViewJoined: self._pay,
            moves.Reduce: train.reduce,
            moves.CastVote: train.cast_vote,
            moves.Repeat: train.repeat,
            moves.Apply: train.apply,
            moves.Advance: train.apply,
            moves.StepCommitted: train.publish,
            moves.Expect: lambda move: train.expect(),
            moves.Save: self._save,
            moves.Digest: self._digest,
        }

    @property
    def _trained(self) -> TrainStep:
        assert self._train_step is not None
        return self._train_step

    def _share(self, move: moves.AssignShards) -> None:
        self._membership.joined()
        view, arriving = move.view, self._loop.rank_machine.arriving
        here = arriving.state if arriving is not None else self._here()
        member = self._loop.client.protocol.member
        column, groups = view.column_of(member), self._membership.groups
        self._joined, self._loop.rank = (view, here.step), view.rank_of(member)
        beyond = InView(view, groups) if self._mesh.divides else None
        self._trained.join(groups.column, column, column.rank_of(member), here, move.begun, beyond)
        if arriving is None:
            self._loop.recorder.switch(COMPUTE)
        self._loop.recorder.place(view.generation, here.history, here.step)

    def _advance(self) -> None:
        """Take the step that others have taken, which this rank was about to take when its view broke."""
        with self._loop.recorder.during(self._loop.recorder.code):
            self._membership.carry(self._loop.rank_machine.take_step(Advance()))
            self._trained.publish_later()

    def _save(self, move: moves.Save) -> None:
        self._saver.begin(move.request, self._here(), self._loop.rank_machine.view, self._trained.layout.share())
        if move.still:
            self._saver.settle()

    def _digest(self, move: moves.Digest) -> str:
        """The digest at the end: wait until all ranks hold the last state, and it is kept."""
        self._trained.body.leave()
        self._saver.settle()
        if self._loop.client.protocol.ends_here:
            self._reports.ended()
        self._loop.recorder.switch(FINISH)
        seed_step(self.seed, self._here().step)  # also for a rank that joined after the last commit
        return self._trained.layout.digest(self._here().step)
