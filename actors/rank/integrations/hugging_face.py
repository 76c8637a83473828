"""``transformers.Trainer`` over a run of Fleet. Only its training loop is replaced; all else is the Trainer's own.

Each rank has a whole Trainer. Each rank gets the events of a step once, in its commit, and callbacks decide the same there. Their state
(``ExportableState``) is part of the tracked state. So a rank that joins later has it, and so has a resumed run. One rank makes an
evaluation and a save. All ranks get the results, also a rank that joined right after the commit.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from actors.rank.current import current_run, is_main
from actors.rank.data.feeds import ShardedDataset
from actors.rank.data.sampling import Ordered
from actors.rank.integrations.surroundings import HandedOn, be_alone, check_versions
from fleet.errors import ConfigError, LoopError

TESTED: Mapping[str, tuple[str, ...]] = {"transformers": ("5.24",), "accelerate": ("1.15",)}
check_versions("transformers", TESTED)
be_alone()

import transformers  # noqa: E402 - what is missing, or of another version, is named first
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # noqa: E402
from transformers.trainer_callback import ExportableState, PrinterCallback  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, sort_checkpoints, speed_metrics  # noqa: E402

from actors.rank.integrations.hugging_face_refused import (  # noqa: E402
    check_arguments,
    check_callbacks,
    check_data,
    check_methods,
    check_run,
)

if TYPE_CHECKING:
    from actors.rank.loop import Run
    from actors.rank.step.step import Step

NAME = "transformers.Trainer"
"""The name of work that one rank does for all."""


OF_TIME = ("_runtime", "_per_second", "_time")
"""Ends of the names of metrics that are not of the model."""


class NoEvents:
    """The callbacks during an evaluation or a save of one rank: it can read them, and they get no events."""

    def __init__(self, handler: Any) -> None:
        self.callbacks = handler.callbacks
        self.eval_dataloader: Any = None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda args, state, control, *others, **named: control


@dataclass
class Training:
    """One call of ``train()``.

    Attributes:
        steps: of the whole run; ``epoch_steps``: of an epoch.
        ignored: keys of outputs that evaluations leave out.
        losses: the sum over all steps; ``window``: the sum since the last entry of the log, which was made after ``logged`` steps.
        begun: the step whose begin events callbacks on this rank have got.
        settled: the number of steps after which this rank has done all due evaluations and saves.
    """

    run: Run
    steps: int
    epoch_steps: int
    ignored: list[str] | None
    began_s: float
    carried: HandedOn = field(default_factory=HandedOn)
    losses: float = 0.0
    window: float = 0.0
    logged: int = 0
    begun: int = -1
    settled: int = 0


class TransformersTrainer(transformers.Trainer):
    """``transformers.Trainer`` whose ``train()`` takes the steps of a Fleet run, in a function ``train(run)`` of the script for ``fleet
    run``.

    A step's batch has ``per_device_train_batch_size * gradient_accumulation_steps`` samples at any number of ranks. The training is that of
    the real Trainer in one process. Arguments, attributes and methods are those of ``transformers.Trainer``.

    Raises ConfigError for each unsupported argument or method, when the Trainer is made or when ``train()`` is called: see
    docs/transformers.md.
    """

    callback_handler: Any
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **named: Any) -> None:
        if args is not None:
            check_arguments(args)
        check_methods(type(self), TransformersTrainer)
        self._alone = self._committing = False
        self._step: Step | None = None
        self._weight: Any = None
        super().__init__(model, args, *others, **named)
        check_arguments(self.args)
        if self.pop_callback(DEFAULT_PROGRESS_CALLBACK) is not None:
            self.add_callback(PrinterCallback)  # a bar belongs to one process, and the first rank changes

    # ---- training ------------------------------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:  # fmt: skip
        """As the Trainer's method. Spare ranks leave it by ``RunOver``. Raises ConfigError for an unsupported argument."""
        if resume_from_checkpoint:
            reason = "Fleet goes on from its own checkpoints, which have the optimizer and the step, too"
            raise ConfigError("resume_from_checkpoint", resume_from_checkpoint, reason, "Leave it out, and use fleet run --resume RUN.")
        if trial is not None:
            raise ConfigError("trial", trial, "a run trains one model", "Start a run for each trial.")
        check_arguments(self.args)
        check_callbacks(self.callback_handler.callbacks)
        check_data(self.train_dataset)
        return super().train(ignore_keys_for_eval=ignore_keys_for_eval)

    def _inner_training_loop(
        self, batch_size: int | None = None, args: Any = None, resume_from_checkpoint: Any = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:  # fmt: skip
        run = current_run()
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()  # not read: it only gives the number of steps, and is shown to callbacks
        epochs, epoch_steps, _, samples, whole_batch, _, steps = self.set_initial_training_values(self.args, loader)
        check_run(run, self.args, whole_batch)
        steps = run.config.steps or steps
        training = Training(run, steps, epoch_steps, ignore_keys_for_eval, time.time())
        if run.is_twin and os.path.isabs(self.args.output_dir):
            self.args.output_dir = os.path.join(run.folder, "saved", self.args.output_dir.lstrip(os.sep))
        self._init_training_state(steps, epoch_steps, epochs, None, None)
        self._prepare(steps, loader)
        self._initial_num_input_tokens_seen = 0
        self.current_gradient_accumulation_steps = 1  # a shard's loss is not divided: the step's loss is a mean of them
        dataset, collate = self._samples()
        training.carried.values = self._left(training)
        state = run.track(model=self.model, optimizer=self.optimizer, scheduler=self.lr_scheduler, trainer=training.carried)
        self._show_main()
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        for step in run.steps(state, total=steps, clip_norm=self.args.max_grad_norm if self.args.max_grad_norm > 0 else None):
            if self._begin_step(training, step):
                continue  # no step is left
            for inputs in step.batches(dataset, batch_size=whole_batch, collate_fn=collate):
                self._micro_batch(inputs)
            step.on_commit(partial(self._committed, training, step, self._get_learning_rate()))
            if step.commit():
                self._settle(training)
        return self._finish(training, samples)

    def _prepare(self, steps: int, loader: Any) -> None:
        """Make the Trainer's objects before its loop. ``prepare_model`` puts the model into autocast where ``bf16`` asks for it."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=steps)
        self.accelerator.prepare_model(self.model)
        self.accelerator.backward = self._backward
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader

    def _samples(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """(dataset, collate function), as in the Trainer's own loader."""
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        workers = self.args.dataloader_num_workers
        return (dataset if isinstance(dataset, Ordered) or not workers else ShardedDataset(dataset, workers=workers)), collate

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def _begin_step(self, training: Training, step: Step) -> bool:
        """Give the events of a begin, once for each step. True: the run ends instead, as a rank that has just joined may learn here."""
        self._step = step
        if step.rehearsal:
            return False
        if training.carried.fresh:
            self._take(training, step.number)
        if self._settle(training):
            return True
        if step.number != training.begun:
            training.begun = step.number
            self._at(training, step.number)
            if step.number % training.epoch_steps == 0:
                self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        return False

    def _at(self, training: Training, steps_taken: int) -> None:
        self.state.global_step = steps_taken
        self.state.epoch = steps_taken / training.epoch_steps
        self._show_main()

    def _show_main(self) -> None:
        """Set whether this rank prints and reports, which changes during the run."""
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.is_world_process_zero()

    def _micro_batch(self, inputs: Any) -> None:
        """Forward and backward of one shard, by the Trainer's own step, which ends with ``accelerator.backward(loss)``.

        A loss that is divided by ``num_items_in_batch`` is divided by the items of its shard. Their number is its weight, so the gradient
        is the same.
        """
        items = self._get_num_items_in_batch([inputs], self.args.device)
        divided = self.loss_is_scaled_for_ga
        if divided is None:
            divided = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        self._weight = items if divided else None
        self.training_step(self.model, inputs, items)

    def _backward(self, loss: torch.Tensor, **named: Any) -> None:
        """Replaces ``accelerator.backward``."""
        assert self._step is not None
        self._step.backward(loss, weight=self._weight)

    def _committed(self, training: Training, step: Step, rate: float) -> None:
        """Give events and log, in the commit: so the callbacks' state belongs to that of the step. An evaluation follows after it."""
        self._committing = True
        taken = step.number + 1
        training.losses += step.loss
        training.window += step.loss
        self._at(training, taken)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if taken % training.epoch_steps == 0 or self.control.should_training_stop:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        if self.control.should_log and taken > training.logged:
            mean = training.window / (taken - training.logged)
            training.window, training.logged = 0.0, taken
            self.log({"loss": mean, "grad_norm": step.grad_norm, "learning_rate": rate}, training.began_s)
        if self.control.should_epoch_stop:
            reason = "an epoch that ends early would leave out samples that other ranks count"
            raise ConfigError("control.should_epoch_stop", True, reason, "Set should_training_stop, or leave it out.")
        training.carried.values = self._left(training)
        self._committing = False

    # ---- after a step --------------------------------------------------------------------------------------------------------------------

    def _settle(self, training: Training) -> bool:
        """Evaluate and save, if callbacks have asked for it. True: the run ends here.

        A rank that joined after the commit gets both results before its first step.
        """
        taken = training.run.steps_taken
        if training.settled == taken:
            return False
        stops = self.control.should_training_stop
        if self.control.should_evaluate:
            self._evaluate_for_all(training)
        if self.control.should_save:
            self.state.best_model_checkpoint = training.run.recalled(lambda before, step: self._save_here(), name=f"{NAME} checkpoint")
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        training.settled = taken
        if self.control.should_training_stop and not stops and taken % training.epoch_steps:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        if self.control.should_training_stop and taken < training.steps:
            training.run.stop(f"a callback of the Trainer has ended it after step {taken}")
            return True
        return False

    @contextlib.contextmanager
    def _by_this_rank(self) -> Iterator[None]:
        """Context in which ``evaluate`` and ``save_model`` are the Trainer's own, and callbacks get no events."""
        before, handler = self._alone, self.callback_handler
        self._alone, self.callback_handler = True, NoEvents(handler)
        try:
            yield
        finally:
            self._alone, self.callback_handler = before, handler

    def _evaluate_for_all(self, training: Training) -> None:
        """One rank evaluates; on all ranks callbacks get the metrics, so they decide the same."""
        figures = training.run.evaluate(partial(self._figures, training))
        if figures is not None:
            self._judge(dict(figures))

    def _judge(self, metrics: dict[str, Any]) -> None:
        self._note_metrics(dict(metrics))
        better = self._determine_best_metric(metrics=metrics, trial=None)
        if self.args.save_strategy == SaveStrategy.BEST:
            self.control.should_save = better

    def _figures(self, training: Training) -> dict[str, float]:
        """The figures of an evaluation, on one rank, without those of time."""
        with self._by_this_rank():
            found = _plain(self._evaluate(None, training.ignored))
        return {name: value for name, value in found.items() if isinstance(value, int | float) and not name.endswith(OF_TIME)}

    def _note_metrics(self, metrics: dict[str, Any]) -> None:
        """Log an evaluation and give its events, for each of its datasets."""
        named = self.eval_dataset if isinstance(self.eval_dataset, dict) else ()
        parts = [{name: value for name, value in metrics.items() if name.startswith(f"eval_{each}_")} for each in named]
        for part in [each for each in parts if each] or [metrics]:
            self.log(part)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, part)

    def _left(self, training: Training) -> dict[str, Any]:
        """The Trainer's state after a step, for ranks that join later."""
        callbacks = [[type(each).__name__, each.state()["attributes"]] for each in self._carried_callbacks()]
        best = [self.state.best_metric, self.state.best_global_step, self.state.best_model_checkpoint is not None]
        sums = [training.losses, training.window, training.logged]
        return {"sums": sums, "callbacks": copy.deepcopy(callbacks), "control": self.control.state()["args"], "best": best}

    def _take(self, training: Training, taken: int) -> None:
        """Take over the state of :meth:`_left`. The work after that step is done next, if a step was taken."""
        left, training.carried.fresh = training.carried.values, False
        training.losses, training.window, training.logged = left["sums"]
        training.settled = 0
        self._at(training, taken)
        self.state.best_metric, self.state.best_global_step, saved = left["best"]
        self.state.best_model_checkpoint = self._checkpoint(self.state.best_global_step) if saved else None
        mine, theirs = self._carried_callbacks(), left["callbacks"]
        if [type(each).__name__ for each in mine] != [name for name, _ in theirs]:
            reason = f"the state is of a run with {[name for name, _ in theirs]}"
            raise ConfigError("callbacks", [type(each).__name__ for each in mine], reason, "Give the Trainer the same callbacks.")
        for callback, (_, attributes) in zip(mine, theirs, strict=True):
            for name, value in copy.deepcopy(attributes).items():
                setattr(callback, name, value)
        for name, value in left["control"].items():
            setattr(self.control, name, value)

    def _carried_callbacks(self) -> list[Any]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)]

    def _checkpoint(self, steps_taken: int) -> str:
        return os.path.join(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{steps_taken}")

    def _save_here(self) -> str | None:
        """Save a checkpoint on this rank. Returns the best one so far."""
        with self._by_this_rank():
            self._save_checkpoint(self.model, None)
        best: str | None = self.state.best_model_checkpoint
        return best

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the model and the Trainer's state: Fleet's own checkpoints have the rest."""
        asked, self.args.save_only_model = self.args.save_only_model, True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_only_model = asked

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:  # fmt: skip
        """As the Trainer's method. One rank evaluates; all ranks and their callbacks get its metrics."""
        evaluate = super().evaluate
        if self._alone:
            return dict(evaluate(eval_dataset, ignore_keys, metric_key_prefix))
        self._check_outside("evaluate()", "Set control.should_evaluate.")

        def do() -> dict[str, Any]:
            with self._by_this_rank():
                return _plain(evaluate(eval_dataset, ignore_keys, metric_key_prefix))

        metrics = dict(current_run().once(do, name=f"{NAME} evaluate {metric_key_prefix}"))
        self._note_metrics(dict(metrics))
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's method, but not within an evaluation of one rank: all ranks log its result afterwards."""
        if not self._alone:
            super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's method: one rank calls ``save_pretrained``, once."""
        save = super().save_model
        if self._alone:
            save(output_dir, _internal_call)
            return
        self._check_outside("save_model()", "Set control.should_save.")
        run = current_run()
        if output_dir is not None and run.is_twin and os.path.isabs(output_dir):
            output_dir = os.path.join(run.folder, "saved", output_dir.lstrip(os.sep))

        def do() -> None:
            with self._by_this_rank():
                save(output_dir, _internal_call)

        run.once(do, name=f"{NAME} save {output_dir}")

    def _check_outside(self, call: str, way_out: str) -> None:
        if self._committing:
            raise LoopError(f"trainer.{call} was called by a callback, within the commit of a step. {way_out}")

    # ---- the end -------------------------------------------------------------------------------------------------------------------------

    def _finish(self, training: Training, samples: float) -> Any:
        """End the training, on all ranks that hold the final state."""
        taken = training.run.steps_taken
        if training.carried.fresh:
            self._take(training, taken)
            self._settle_late(training)
        self._at(training, taken)
        mean = training.losses / max(taken, 1)
        metrics = speed_metrics("train", training.began_s, num_samples=samples * taken / training.steps, num_steps=taken)
        metrics |= {"total_flos": 0.0, "train_loss": mean}
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        best = training.run.once(lambda: self.state.best_model_checkpoint, name=f"{NAME} best")
        if self.args.load_best_model_at_end and best is not None:
            if not os.path.isdir(best):
                reason = f"{best} is not there on this machine: another rank has saved it"
                raise ConfigError("output_dir", self.args.output_dir, reason, "Choose a folder that all nodes share.")
            self._load_best_model()
        if best is not None and self.args.save_total_limit == 1:
            training.run.once(lambda: self._delete_others(best), name=f"{NAME} delete")
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if self.neftune_noise_alpha is not None:
            transformers.trainer.deactivate_neftune(self.model, self.neftune_hook_handle, self.accelerator)
        self.is_in_train = False
        return TrainOutput(taken, mean, metrics)

    def _settle_late(self, training: Training) -> None:
        """This rank joined after the last commit: repeat the evaluation, so that it decides as the others did."""
        if self.control.should_evaluate:
            self._judge(self._figures(training))
            if self.control.should_save and self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = self._checkpoint(self.state.global_step)

    def _delete_others(self, best: str) -> None:
        for checkpoint in sort_checkpoints(output_dir=self.args.output_dir, best_model_checkpoint=best):
            if not os.path.samefile(checkpoint, best):
                shutil.rmtree(checkpoint)

    # ---- its place among the ranks -------------------------------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """True on one rank at a time: ``fleet.is_main()``."""
        return is_main()

    def is_local_process_zero(self) -> bool:
        """See :meth:`is_world_process_zero`."""
        return is_main()


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """``metrics`` as values that JSON can hold."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
