"""Lightning's ``Trainer`` over a run of Fleet. Its loop over epochs and batches is replaced; validation and callbacks are Lightning's.

Each rank has a whole Trainer. Events, a validation and a checkpoint of a step follow its commit on all ranks. A rank that joined right
after the commit does this work before its first step. It has the callbacks' state from before, so they decide the same. One rank makes a
validation, and writes a file.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from actors.rank.current import current_run, is_main
from actors.rank.data.feeds import ShardedDataset
from actors.rank.data.sampling import Ordered, Shared, generators_kept, samples_of, seed_data, seed_shard
from actors.rank.integrations.surroundings import HandedOn, be_alone, check_versions
from fleet.errors import ConfigError, RunOver

TESTED: Mapping[str, tuple[str, ...]] = {"lightning": ("2.6",)}
check_versions("lightning", TESTED)
be_alone()

from lightning.pytorch import Trainer  # noqa: E402 - what is missing, or of another version, is named first
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loops.fit_loop import _FitLoop  # noqa: E402
from lightning.pytorch.loops.optimization.automatic import ClosureResult  # noqa: E402
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.trainer import call  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # noqa: E402

from actors.rank.integrations.lightning_manual import ByHand, Hand, stepped_by_commits  # noqa: E402
from actors.rank.integrations.lightning_probe import probed  # noqa: E402
from actors.rank.integrations.lightning_refused import (  # noqa: E402
    by_hand_refused,
    check_arguments,
    check_left_out,
    check_loader,
    check_module,
    check_optimizers,
    check_run,
)

if TYPE_CHECKING:
    from actors.rank.loop import Run
    from actors.rank.step.step import Step

NAME = "lightning.Trainer"
"""The name of work that one rank does for all."""

VALIDATED = ("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end")


class OneOfMany(SingleDeviceStrategy):
    """A strategy of one process. One rank writes files, and one rank decides for all where a decision depends on a disk."""

    within_loop = alone = False
    hand: Hand | None = None

    def by_one(self, what: str, fn: Any) -> Any:
        """Run ``fn()`` on one rank, and return its result on all."""
        if self.alone:
            return fn()
        name = f"{NAME} {what}"
        return current_run().recalled(lambda before, step: fn(), name=name) if self.within_loop else current_run().once(fn, name=name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """See ``Strategy``, here and below."""
        return self.by_one("broadcasts", lambda: obj) if isinstance(obj, str | int | float | bool | None) else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - a name of Lightning's
        return bool(self.by_one("decides", lambda: decision))

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See ``Strategy``, here and below. Only ``training_step`` with manual optimization calls this and ``optimizer_step``."""
        if self.hand is None:
            raise by_hand_refused("optimizers")
        self.hand.backward(closure_loss, *args, **kwargs)
        return closure_loss.detach()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> None:
        if self.hand is None:
            raise by_hand_refused("optimizers")
        self.hand.step(optimizer, closure, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save = super().save_checkpoint
        self.by_one(f"saves {os.path.basename(filepath)}", lambda: save(checkpoint, filepath, storage_options))

    def remove_checkpoint(self, filepath: Any) -> None:
        remove = super().remove_checkpoint
        self.by_one(f"removes {os.path.basename(filepath)}", lambda: remove(filepath))


class Schedules:
    """Tracked schedules, which are stepped once a step or once an epoch."""

    def __init__(self, configs: list[Any]) -> None:
        self._configs = configs

    def state_dict(self) -> dict[str, Any]:
        """The tracked state of the schedules."""
        return {str(number): each.scheduler.state_dict() for number, each in enumerate(self._configs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`state_dict`."""
        for number, each in enumerate(self._configs):
            each.scheduler.load_state_dict(state[str(number)])

    def due(self, steps_taken: int, epoch_steps: int) -> list[Any]:
        """The schedules to step after so many steps."""
        epochs, rest = divmod(steps_taken, epoch_steps)
        counts = {"step": (steps_taken - 1) % epoch_steps + 1, "epoch": epochs if rest == 0 else 0}
        return [each.scheduler for each in self._configs if (count := counts[each.interval]) and count % each.frequency == 0]


@dataclass
class Fitting:
    """One call of ``fit()``.

    Attributes:
        dataset, batch_size: of a step.
        epoch_rounds: rounds of an epoch. A round is a step; with several optimizers, all steps of a batch.
        every: rounds from one validation to the next.
        hand: the manual optimization; None: it is automatic. ``steps``: of the whole run.
        loss: of the last step.
        begun: the step whose begin events callbacks on this rank have got.
        settled: the number of steps after which this rank has done all due work.
    """

    run: Run
    dataset: Any
    batch_size: int
    epoch_rounds: int
    every: float
    schedules: Schedules
    hand: ByHand | None = None
    steps: int = 0
    handed: HandedOn = field(default_factory=HandedOn)
    loss: float = math.nan
    begun: int = -1
    settled: int = 0

    @property
    def turns(self) -> int:
        """Steps of a round."""
        return len(self.hand.turns.ends) if self.hand else 1

    def stepped(self, steps: int) -> int:
        """How often optimizers step in so many steps of the run."""
        rounds, turn = divmod(steps, self.turns)
        return steps if self.hand is None else rounds * self.hand.turns.ends[-1] + self.hand.turns.begin(turn)


class FleetFitLoop(_FitLoop):
    """Replaces Lightning's loop."""

    over = False

    def run(self) -> None:
        """See ``_FitLoop``. It sets ``over`` on a rank that is not in the last view."""
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        try:
            self._take_steps(current_run())
        except RunOver:
            self.over = True
            return
        finally:
            self.trainer.strategy.within_loop = False
        self._restarting = False
        self.on_run_end()

    def _take_steps(self, run: Run) -> None:
        trainer, loader = self.trainer, check_loader(self._combined_loader.flattened)
        check_optimizers(trainer.optimizers, trainer.lr_scheduler_configs)
        fitting = self._fitting(run, loader)
        optimizers = trainer.optimizers
        names = [f"optimizer_{number}" for number in range(len(optimizers))] if len(optimizers) > 1 else ["optimizer"]
        state = run.track(
            model=trainer.lightning_module, schedules=fitting.schedules, trainer=fitting.handed, **dict(zip(names, optimizers, strict=True))
        )  # fmt: skip
        hand, clip_norm = fitting.hand, trainer.gradient_clip_val or None
        if hand is not None:
            norms = zip(hand.turns.optimizers, hand.turns.norms, strict=True)
            clip_norm = {optimizers[number]: norm for number, norm in norms if norm is not None} or None
        stepped: AbstractContextManager[list[Callable[[], None]]] = stepped_by_commits(trainer) if hand else nullcontext([])
        with stepped as stepping:
            for step in run.steps(state, total=fitting.steps, clip_norm=clip_norm, together=fitting.turns):
                trainer.strategy.within_loop = True
                if self._begin_step(fitting, step):
                    continue  # no step is left
                for batch in step.batches(fitting.dataset, batch_size=fitting.batch_size, collate_fn=loader.collate_fn):
                    self._micro_batch(fitting, step, batch)
                if hand:
                    hand.follow(step.number, self._batch_idx(fitting, step))
                step.on_commit(partial(self._committed, fitting, step, stepping))
                if step.commit(*(optimizers[number] for number in hand.taken(step.number)) if hand else ()):
                    self._settle(fitting)
        self._take_over(fitting, run.steps_taken)

    def _fitting(self, run: Run, loader: Any) -> Fitting:
        trainer, accumulated = self.trainer, self.trainer.accumulate_grad_batches
        whole_batch = loader.batch_size * accumulated
        between = trainer.val_check_batch if trainer.enable_validation else math.inf
        between = math.inf if between == self.max_batches else between
        check_run(run, trainer.strategy.root_device, whole_batch, 0 if between == math.inf else between, accumulated)
        dataset = loader.dataset
        if loader.num_workers and not isinstance(dataset, Ordered):
            dataset = ShardedDataset(dataset, workers=loader.num_workers)
        schedules = Schedules(trainer.lr_scheduler_configs)
        fitting = Fitting(run, dataset, whole_batch, math.ceil(self.max_batches / accumulated), between / accumulated, schedules)
        if not trainer.lightning_module.automatic_optimization:
            with generators_kept():
                seed_data(run.seed, 0, 0)
                first = self._prepared(loader.collate_fn(samples_of(dataset, run.seed, 0, 0, run.shards, whole_batch)))
            fitting.hand = ByHand(trainer, probed(trainer, run.seed, first), first)
            fitting.dataset = Shared(dataset, fitting.turns)
            check_left_out(run.config.left_out, fitting.turns)
        fitting.steps = self._steps(fitting)
        fitting.handed.values = self._left(fitting)
        return fitting

    def _steps(self, fitting: Fitting) -> int:
        """The steps of the whole run, in whole rounds."""
        run = fitting.run
        limits = [math.ceil(self.max_steps / fitting.stepped(fitting.turns))] if self.max_steps >= 0 else []
        limits += [self.max_epochs * fitting.epoch_rounds] if self.max_epochs is not None and self.max_epochs >= 0 else []
        if not (run.config.steps or limits):
            raise ConfigError("max_epochs", self.max_epochs, "a run has a number of steps", "Set max_epochs or max_steps.")
        return run.config.steps or min(limits) * fitting.turns

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def _begin_step(self, fitting: Fitting, step: Step) -> bool:
        """Give the events of a begin, once for each step. True: the run ends instead, as a rank that has just joined may learn here."""
        if step.rehearsal:
            return False
        self._take_over(fitting, step.number)
        if self._settle(fitting):
            return True
        if step.number != fitting.begun:
            fitting.begun = step.number
            rounds, turn = divmod(step.number, fitting.turns)
            self._at(fitting, step.number, rounds // fitting.epoch_rounds)
            self.epoch_loop.batch_progress.is_last_batch = (rounds + 1) % fitting.epoch_rounds == 0
            if turn == 0 and rounds % fitting.epoch_rounds == 0:
                self._event("on_train_epoch_start")
            if turn == 0:
                self._event("on_train_batch_start", None, rounds % fitting.epoch_rounds)
        return False

    def _take_over(self, fitting: Fitting, taken: int) -> None:
        """Give the callbacks their state from other ranks. The due work after that step comes next."""
        if not fitting.handed.fresh:
            return
        back = {short: folder for folder, short in self._folders().items()}
        left, fitting.handed.fresh, fitting.settled = _renamed(fitting.handed.values, back), False, 0
        fitting.loss, self.trainer.should_stop = left["loss"], left["stop"]
        metrics = self.trainer._logger_connector._callback_metrics
        metrics.clear()
        metrics.update(left["metrics"])
        for callback in self.trainer.callbacks:
            if (state := left["callbacks"].get(callback.state_key)) is not None:
                _restore(callback, state)

    def _at(self, fitting: Fitting, steps_taken: int, epoch: int) -> None:
        """Set Lightning's counters to their values after so many steps, in this epoch."""
        loop, batches, rounds = self.epoch_loop, self.trainer.accumulate_grad_batches, steps_taken // fitting.turns
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps_taken
        loop.manual_optimization.optim_step_progress.total.completed = fitting.stepped(steps_taken)
        loop._batches_that_stepped = rounds
        loop.batch_progress.current.ready = min((rounds - epoch * fitting.epoch_rounds) * batches, int(self.max_batches))
        loop.batch_progress.total.ready = rounds * batches
        self.epoch_progress.current.completed = self.epoch_progress.current.processed = epoch
        rank_zero_only.rank = 0 if is_main() else 1  # the rank that prints and logs changes during the run

    def _event(self, name: str, *given: Any) -> None:
        call._call_callback_hooks(self.trainer, name, *given)
        if call._call_lightning_module_hook(self.trainer, name, *given) == -1:
            module = type(self.trainer.lightning_module).__name__
            raise ConfigError(module, f"{name} returned -1", "an epoch that ends early would leave samples out", "Set trainer.should_stop.")

    def _batch_idx(self, fitting: Fitting, step: Step) -> int:
        """The index in the epoch: of the batch with manual optimization, else of the micro-batch."""
        if fitting.hand is None:
            return step.number % fitting.epoch_rounds * fitting.run.shards + step.shard
        return step.number // fitting.turns % fitting.epoch_rounds

    def _prepared(self, batch: Any) -> Any:
        trainer = self.trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        trainer._logger_connector.on_batch_start(batch)
        return batch

    def _micro_batch(self, fitting: Fitting, step: Step, batch: Any) -> None:
        """Forward and backward of one shard, by the module's ``training_step``."""
        trainer, loop, number = self.trainer, self.epoch_loop, self._batch_idx(fitting, step)
        if fitting.hand is not None:
            seed_shard(fitting.run.seed, step.number // fitting.turns, step.shard)
            fitting.hand.run(step.number, self._prepared(batch), number, step.backward)
        else:
            given = loop._build_kwargs(OrderedDict(), self._prepared(batch), number)
            found = ClosureResult.from_training_step_output(call._call_strategy_hook(trainer, "training_step", *given.values()))
            if found.closure_loss is None:
                reason = "a micro-batch without a loss would weigh the others more"
                raise ConfigError("training_step", None, reason, "Return a loss, of zero where there is nothing to learn.")
            step.backward(found.closure_loss)
        logged = {**loop._results.metrics(True)["log"], **loop._results.metrics(False)["log"]}
        figures = {name: value for name, value in logged.items() if not name.endswith("_epoch") and name != "loss"}
        if figures:
            step.log(**figures)
        loop._results.clear()

    def _committed(self, fitting: Fitting, step: Step, stepping: list[Callable[[], None]]) -> None:
        """In the commit: step the schedules, and keep the callbacks' state before the events of the step."""
        fitting.loss = step.loss
        if fitting.hand is not None:
            for number in fitting.hand.due:
                stepping[number]()
        else:
            for schedule in fitting.schedules.due(step.number + 1, fitting.epoch_rounds):
                call._call_lightning_module_hook(self.trainer, "lr_scheduler_step", schedule, None)
        fitting.handed.values = self._left(fitting)

    def _left(self, fitting: Fitting) -> dict[str, Any]:
        callbacks = {each.state_key: each.state_dict() for each in self.trainer.callbacks}
        metrics = dict(self.trainer._logger_connector._callback_metrics)
        left = {"loss": fitting.loss, "stop": self.trainer.should_stop, "metrics": metrics, "callbacks": callbacks}
        copied: dict[str, Any] = _renamed(left, self._folders())
        return copied

    def _folders(self) -> dict[str, str]:
        """Folder -> its name in the tracked state: folders differ in a twin, and may differ in a resume."""
        kept = [each.dirpath for each in self.trainer.callbacks if isinstance(each, ModelCheckpoint) and each.dirpath]
        return {os.fspath(folder): f"{{checkpoints {number}}}" for number, folder in enumerate(kept)} | {os.getcwd(): "{here}"}

    # ---- after a step --------------------------------------------------------------------------------------------------------------------

    def _settle(self, fitting: Fitting) -> bool:
        """Do the due work after the last step, unless this rank has done it. True: the run ends by it."""
        taken, trainer = fitting.run.steps_taken, self.trainer
        if fitting.settled == taken or taken % fitting.turns:
            return False
        rounds = taken // fitting.turns
        epoch, rest = divmod(rounds - 1, fitting.epoch_rounds)
        self._at(fitting, taken, epoch)
        ends = rest + 1 == fitting.epoch_rounds
        self._event("on_train_batch_end", {"loss": torch.tensor(fitting.loss, device="cpu")}, None, rest)
        if rounds % trainer.log_every_n_steps == 0:
            trainer._logger_connector.log_metrics({"loss": torch.tensor(fitting.loss, device="cpu")})
        if trainer.enable_validation and self._validates(fitting, epoch, rounds, rest + 1, ends):
            self._validate(fitting)
        if ends or taken == fitting.steps:
            self._end_epoch(epoch)
        fitting.settled = taken
        if trainer.should_stop and self._can_stop_early and taken < fitting.steps:
            fitting.run.stop(f"trainer.should_stop was set after step {taken}")
            return True
        return False

    def _validates(self, fitting: Fitting, epoch: int, rounds: int, in_epoch: int, ends: bool) -> bool:
        every_epochs = self.trainer.check_val_every_n_epoch
        if every_epochs is None:
            return rounds % fitting.every == 0
        return (epoch + 1) % every_epochs == 0 and (ends if fitting.every == math.inf else in_epoch % fitting.every == 0)

    def _end_epoch(self, epoch: int) -> None:
        self.epoch_progress.current.processed = epoch + 1
        call._call_callback_hooks(self.trainer, "on_train_epoch_end", monitoring_callbacks=False)
        call._call_lightning_module_hook(self.trainer, "on_train_epoch_end")
        call._call_callback_hooks(self.trainer, "on_train_epoch_end", monitoring_callbacks=True)
        self.epoch_loop._results.clear()
        self.epoch_progress.current.completed = epoch + 1

    def _validate(self, fitting: Fitting) -> None:
        """One rank validates; all ranks and their callbacks get its figures."""
        figures = fitting.run.evaluate(self._figures)
        if figures is None:
            return
        trainer, metrics = self.trainer, {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in figures.items()}
        trainer._logger_connector._callback_metrics.update(metrics)
        trainer._logger_connector.log_metrics(metrics)
        trainer.validating = True
        for name in VALIDATED:
            call._call_callback_hooks(trainer, name)
        trainer.training = True

    def _figures(self) -> dict[str, float]:
        """Validate, on one rank. The module's hooks are called there, and those of callbacks on all ranks afterwards."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        callbacks, loggers, before = trainer.callbacks, trainer.loggers, dict(connector._callback_metrics)
        trainer.callbacks, trainer.loggers, trainer.strategy.alone = [], [], True
        connector._callback_metrics.clear()
        trainer.validating = True
        try:
            self.epoch_loop.val_loop.run()
            return {name: float(value) for name, value in connector._callback_metrics.items()}
        finally:
            trainer.training, trainer.strategy.alone = True, False
            trainer.callbacks, trainer.loggers = callbacks, loggers
            connector._callback_metrics.clear()
            connector._callback_metrics.update(before)


class LightningTrainer(Trainer):
    """``lightning.Trainer`` whose ``fit()`` takes the steps of a Fleet run, in a function ``train(run)`` of the script for ``fleet run``.

    A step's batch has ``batch_size * accumulate_grad_batches`` samples at any number of ranks. The training is that of the real Trainer in
    one process. Arguments are those of ``lightning.Trainer``, by name.

    Raises ConfigError for each unsupported argument or method, when the Trainer is made or when ``fit()`` is called: see docs/lightning.md.
    """

    def __init__(self, **named: Any) -> None:
        check_arguments(named)
        on_gpu = named.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        strategy = OneOfMany(device=torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
        rank_zero_only.rank = 0 if is_main() else 1
        own = {
            "accelerator": "cuda" if on_gpu else "cpu", "strategy": strategy, "devices": 1, "plugins": [LightningEnvironment()],
            "num_sanity_val_steps": 0, "enable_progress_bar": False,
        }  # fmt: skip
        super().__init__(**named | own)
        loop = FleetFitLoop(self, min_epochs=named.get("min_epochs"), max_epochs=named.get("max_epochs"))
        loop.epoch_loop = _TrainingEpochLoop(self, min_steps=named.get("min_steps"), max_steps=named.get("max_steps", -1))
        self.fit_loop = loop
        self._signal_connector.register_signal_handlers = lambda: None  # a rank's signals are the run's

    def fit(
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None, ckpt_path: Any = None
    ) -> None:  # fmt: skip
        """As the Trainer's method. Spare ranks leave it by ``RunOver``. Raises ConfigError for an unsupported argument."""
        if ckpt_path is not None:
            reason = "Fleet goes on from its own checkpoints, which have the step and the optimizer, too"
            raise ConfigError("ckpt_path", str(ckpt_path), reason, "Leave it out, and use fleet run --resume RUN.")
        check_module(model, self.callbacks)
        _move_apart(current_run(), self.callbacks)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule)
        if self.fit_loop.over:
            raise RunOver


def _move_apart(run: Run, callbacks: list[Any]) -> None:
    """Let a twin's callbacks write in the twin's folder."""
    for each in callbacks if run.is_twin else ():
        if isinstance(each, ModelCheckpoint) and each.dirpath and os.path.isabs(each.dirpath):
            each.dirpath = os.path.join(run.folder, "saved", os.fspath(each.dirpath).lstrip(os.sep))


def _restore(callback: Any, state: Mapping[str, Any]) -> None:
    """Give all of ``state`` to the callback. ``load_state_dict`` of some, such as ModelCheckpoint, does not set all attributes."""
    attributes = vars(callback)
    plain = [name for name, value in callback.state_dict().items() if name in attributes and attributes[name] is value]
    callback.load_state_dict(dict(state))
    for name in plain:
        setattr(callback, name, state[name])


def _renamed(value: Any, folders: Mapping[str, str]) -> Any:
    """A copy in which texts that begin with one of ``folders`` begin with its other name."""
    if isinstance(value, str):
        found = next((folder for folder in folders if value.startswith(folder)), None)
        return value if found is None else folders[found] + value[len(found) :]
    if isinstance(value, Mapping):
        return {_renamed(key, folders): _renamed(each, folders) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(each, folders) for each in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
