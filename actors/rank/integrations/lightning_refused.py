"""Refusals of the adapter of Lightning's Trainer: each unsupported argument or method by its name, before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from fleet.errors import ConfigError
from fleet.protocol.draws import range_of

CARRIED = frozenset({
    "accelerator", "precision", "logger", "callbacks", "max_epochs", "min_epochs", "max_steps", "min_steps", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
    "log_every_n_steps", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "accumulate_grad_batches",
    "gradient_clip_val", "inference_mode", "use_distributed_sampler", "default_root_dir", "enable_autolog_hparams",
})  # fmt: skip
"""Arguments of ``Trainer`` that may have any value, or are checked below. Each other one has to have its default."""

OTHERWISE: Mapping[str, tuple[str, str]] = {
    "strategy": ("ranks come and go, and are no process group", "Leave it out: fleet run --world says how many there are."),
    "devices": ("a rank has one device", "Leave it out: fleet run --world and --gpus-per-rank say how many there are."),
    "num_nodes": ("nodes are those of the run", "Leave it out: fleet run --nodes."),
    "fast_dev_run": ("it changes the training", "Use fleet run --steps."),
    "max_time": ("ranks have clocks of their own", "Use max_steps, or fleet stop."),
    "gradient_clip_algorithm": ("the commit clips the norm of the whole gradient", "Use norm."),
    "plugins": ("process groups and scalers are not Lightning's here", "Leave it out."),
    "sync_batchnorm": ("statistics are averaged over micro-batches anyway", "Leave it out."),
    "reload_dataloaders_every_n_epochs": ("the run's seed determines the samples of each step", "Leave it out."),
    "limit_train_batches": (
        "other samples would be left out in each epoch",
        "Give a smaller dataset, or use fleet run --steps.",
    ),
    "overfit_batches": ("other samples would be left out in each epoch", "Give a smaller dataset."),
    "deterministic": ("the run decides on it", "Use fleet doctor --determinism."),
}
"""Argument -> (reason, way out). Others are refused as not tested."""

PRECISIONS = (None, "32-true", "32", 32, "64-true", "64", 64, "bf16-mixed", "bf16", "bf16-true")

REPLACED: Mapping[str, str] = {
    "backward": "Leave it out: step.backward is called with the loss.",
    "optimizer_step": "Leave it out: the commit steps the optimizer.",
    "optimizer_zero_grad": "Leave it out: the commit clears gradients.",
    "configure_gradient_clipping": "Use gradient_clip_val.",
    "on_before_zero_grad": "Leave it out: the commit clears gradients.",
    "on_before_backward": "Change the loss in training_step.",
    "on_after_backward": "Leave it out: no rank has the step's gradient outside of the commit.",
    "on_before_optimizer_step": "Leave it out: no rank has the step's gradient outside of the commit.",
}
"""Hooks of modules and callbacks that do not come -> what to do instead."""

IN_TURN = "Step the same optimizers for each batch, also if its samples differ, or use a loop over run.steps."
BY_HAND: Mapping[str, tuple[str, str, str]] = {
    "backward": ("manual_backward", "a step's gradient is that of its losses", "Give it the loss, and retain_graph at most."),
    "optimizer.step": ("optimizer.step", "the commit steps it", "Call manual_backward before it, and step() without arguments."),
    "optimizers": ("optimizers", "the commit steps them", "Step the optimizers of self.optimizers(), in training_step."),
    "clip_gradients": ("clip_gradients", "the commit clips the norm of an optimizer's gradient", "Use norm, with one value."),
    "gradients": (
        "training_step", "no rank has the step's gradient outside of the commit",
        "Leave gradients alone: self.clip_gradients(optimizer, gradient_clip_val=1.0) clips them.",
    ),
    "zero_grad": (
        "training_step", "a gradient left by an earlier step's loss would count once more",
        "Call optimizer.zero_grad() before its backward.",
    ),
    "no backward": ("training_step", "there is no gradient", "Call self.manual_backward(loss) before it, and not loss.backward()."),
    "no step": ("training_step", "nothing is trained", "Step an optimizer in it, for each batch."),
    "never": ("configure_optimizers", "training_step does not step it for the first batch", IN_TURN),
    "others": ("training_step", "the steps of each batch are known before it, and the same on all ranks", IN_TURN),
    "kept": (
        "training_step", "a value from before an optimizer's step is computed again, with the weights after that step",
        "Compute it once more after the step, or use a loop over run.steps.",
    ),
    "schedule": ("lr_scheduler.step", "commits step schedules, on all ranks alike", "Call it without arguments, in training_step."),
    "schedule order": (
        "lr_scheduler.step", "the commit steps schedules after their optimizers", "Call it after the last step of its optimizer.",
    ),
}  # fmt: skip
"""A call in ``training_step`` -> (field, reason, way out)."""

DONE: Mapping[str, str] = {
    "optimizers": "use_pl_optimizer=False, or outside of training_step",
    "gradients": "they were changed between manual_backward and optimizer.step()",
    "zero_grad": "gradients are not cleared",
    "no backward": "optimizer.step() without manual_backward",
    "no step": "no optimizer.step()",
    "others": "other steps than for the first batch",
    "schedule order": "before optimizer.step()",
}
"""The same call -> its description, where there is no value."""


def check_arguments(named: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first unsupported argument of ``Trainer(...)``."""
    usual = {name: each.default for name, each in inspect.signature(Trainer.__init__).parameters.items()}
    for name, value in named.items():
        if name not in usual:
            raise ConfigError(name, value, "Lightning's Trainer has no such argument", "Leave it out.")
        same = value == usual[name] or (name == "devices" and value in (1, "1")) or (name == "gradient_clip_algorithm" and value == "norm")
        if name not in CARRIED and not same:
            reason, way_out = OTHERWISE.get(name, ("the adapter was not tested with it", f"Leave it out: {usual[name]!r} is carried."))
            raise ConfigError(name, value, reason, way_out)
    if named.get("precision") not in PRECISIONS:
        reason = "its scaler would judge one rank's gradient, or it was not tested"
        raise ConfigError("precision", named["precision"], reason, "Use bf16-mixed, bf16-true, 32-true or 64-true.")
    interval = named.get("val_check_interval", 1.0)
    if not isinstance(interval, int | float | None):
        raise ConfigError(
            "val_check_interval", interval, "ranks have clocks of their own", "Give a number of batches, or a part of an epoch."
        )


def check_module(module: Any, callbacks: list[Any]) -> None:
    """Raises ConfigError for the first hook that Fleet does not call, and for one that would step a schedule."""
    for name in () if module.automatic_optimization else (each for each in dir(type(module)) if each.startswith("on_")):
        if "lr_schedulers" in getattr(getattr(type(module), name), "__code__", check_module.__code__).co_names:
            raise by_hand_refused("schedule", name)
    for name, way_out in REPLACED.items():
        for one, parent in [(module, LightningModule), *((each, Callback) for each in callbacks)]:
            if hasattr(parent, name) and is_overridden(name, one, parent=parent):
                raise ConfigError(type(one).__name__, name, "Fleet's loop does not call it", way_out)


def check_loader(loaders: list[Any]) -> DataLoader[Any]:
    """The one loader to train with. Raises ConfigError for several loaders, and for samples or an order that Fleet cannot use."""
    if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
        found = [type(each).__name__ for each in loaders]
        raise ConfigError("train_dataloaders", found, "a step has samples of one dataset", "Give one DataLoader of a dataset of all.")
    loader = loaders[0]
    if isinstance(loader.dataset, IterableDataset):
        reason = "its samples have no numbers, so no other rank can compute those of a lost one"
        raise ConfigError("train_dataloaders", type(loader.dataset).__name__, reason, "Give a map-style dataset, or fleet.data.Streams.")
    if not isinstance(loader.sampler, RandomSampler) or loader.sampler.replacement or loader.batch_size is None:
        reason = "the run's seed determines the samples of each step: epochs are shuffled"
        raise ConfigError("train_dataloaders", type(loader.sampler).__name__, reason, "Give DataLoader(..., batch_size=, shuffle=True).")
    return loader


def by_hand_refused(done: str, value: str = "") -> ConfigError:
    """The refusal of the call ``done`` in manual optimization."""
    field, reason, way_out = BY_HAND[done]
    return ConfigError(field, value or DONE[done], reason, way_out)


def check_optimizers(optimizers: list[Any], schedules: list[Any]) -> None:
    """Raises ConfigError for optimizers and schedules that the commit cannot step."""
    if not optimizers or isinstance(optimizers[0], _MockOptimizer):
        names = [type(each).__name__ for each in optimizers]
        raise ConfigError("configure_optimizers", names, "it is the commit that steps them", "Return one, or several.")
    for each in schedules:
        if each.reduce_on_plateau or not isinstance(each.scheduler, torch.optim.lr_scheduler.LRScheduler):
            name = type(each.scheduler).__name__
            raise ConfigError("lr_scheduler", name, "it needs a figure, which the commit has not", "Choose another schedule.")


def check_left_out(left_out: Sequence[str], turns: int) -> None:
    """Raises ConfigError where ``left_out`` would leave out only some of the steps that share samples."""
    for text in left_out:
        if any(number % turns for number in range_of("left_out", text)):
            raise ConfigError("left_out", text, f"{turns} steps have the samples of one batch", f"Use multiples of {turns}.")


def check_run(run: Any, device: torch.device, batch_size: int, between: float, accumulated: int) -> None:
    """Raises ConfigError where the run's settings do not go with the Trainer's."""
    sharding = run.config.optimizer_sharding
    if sharding == "fsdp":
        raise ConfigError("optimizer_sharding", sharding, "the Trainer saves a model that is whole", "Choose none or zero1.")
    if batch_size % run.shards:
        reason = f"it is the batch of a step, which is cut into {run.shards} shards of equal size"
        way_out = f"Use a multiple of {run.shards}, or fleet run --shards with a divisor of it."
        raise ConfigError("batch_size * accumulate_grad_batches", batch_size, reason, way_out)
    if between % accumulated:
        reason = f"it is {between:g} batches, and a step has {accumulated}"
        raise ConfigError("val_check_interval", between, reason, f"Use a multiple of {accumulated} batches.")
    if run.device.type != device.type:
        reason = f"the rank trains on {run.device.type}, and the Trainer on {device.type}"
        raise ConfigError("accelerator", device.type, reason, "Set accelerator='cpu', or use fleet run --gpus-per-rank 1.")
