"""Refusals of the adapter of the ``Trainer``: each unsupported argument or method by its name, before the first step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainerCallback, TrainingArguments

from fleet.errors import ConfigError

CARRIED = frozenset({
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "gradient_accumulation_steps", "average_tokens_across_devices", "max_grad_norm", "label_smoothing_factor", "bf16", "tf32",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "use_cache", "neftune_noise_alpha", "torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step",
    "log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size",
    "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
    "batch_eval_metrics", "save_only_model", "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "seed", "use_cpu", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order",
    "remove_unused_columns", "label_names", "length_column_name", "skip_memory_metrics", "do_train", "do_eval", "do_predict",
    "local_rank", "logging_nan_inf_filter",
})  # fmt: skip
"""Fields of ``TrainingArguments`` that may have any value. Each other one has to have its default."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
PLATEAU = ("reduce_lr_on_plateau", "greedy")

OTHERWISE: Mapping[str, tuple[str, str]] = {
    "fp16": ("accelerate makes a scaler of its own, which would judge one rank's gradient", "Set bf16=True."),
    "fp16_full_eval": ("it would change the weights of the one rank that evaluates", "Leave it out."),
    "bf16_full_eval": ("it would change the weights of the one rank that evaluates", "Leave it out: with bf16=True autocast does it."),
    "torch_compile": ("the compiled model is another object than the tracked one", "Call model.compile() in the script."),
    "use_liger_kernel": ("it was not tested", "Apply the kernels to the model in the script."),
    "auto_find_batch_size": ("ranks would come to unequal batches", "Use fleet run --shards: more of them need less memory."),
    "deepspeed": ("Fleet spreads the state itself", "Leave it out, and use --optimizer-sharding zero1."),
    "fsdp": ("Fleet spreads the state itself", "Leave it out, and use --optimizer-sharding zero1."),
    "fsdp_config": ("Fleet spreads the state itself", "Leave it out, and use --optimizer-sharding zero1."),
    "parallelism_config": ("ranks come and go, and are no mesh", "Leave it out."),
    "accelerator_config": ("batches, seeds and gradients are not accelerate's here", "Leave it out."),
    "push_to_hub": ("a rank may be lost while it uploads", "Call trainer.push_to_hub() after trainer.train()."),
    "train_sampling_strategy": ("the run's seed determines the samples of each step", "Leave it out, or give fleet.data.Streams."),
    "data_seed": ("the run's seed determines the samples of each step", "Use fleet run --seed."),
    "full_determinism": ("the run decides on it", "Use fleet doctor --determinism."),
    "include_num_input_tokens_seen": ("no rank knows the tokens of all", "Leave it out: the run's report has samples and FLOP/s."),
    "eval_on_start": ("a resumed run has no state before its loop", "Call trainer.evaluate() before trainer.train()."),
    "resume_from_checkpoint": ("Fleet goes on from its own checkpoints", "Use fleet run --resume RUN."),
    "ignore_data_skip": ("a resumed run knows its samples", "Leave it out."),
    "restore_callback_states_from_checkpoint": ("Fleet restores them always", "Leave it out."),
    "enable_jit_checkpoint": ("a run that is stopped writes its state itself", "Leave it out."),
    "save_on_each_node": ("one rank saves", "Leave it out, and save where all nodes can read it."),
    "optim_target_modules": ("it steps within the backward of one rank", "Leave it out."),
    "debug": ("it was not tested", "Leave it out."),
}
"""Field -> (reason, way out), for fields in common use. Others are refused as not tested."""

REPLACED: Mapping[str, str] = {
    "get_train_dataloader": "Give the samples as train_dataset: the run's seed determines the samples of each step.",
    "_get_train_sampler": "Leave it out: the run's seed determines the samples of each step.",
    "get_batch_samples": "Leave it out: a step's micro-batches come from Fleet.",
    "_run_epoch": "Use a callback.",
    "_prepare_for_training": "Use create_optimizer and create_scheduler.",
    "_maybe_log_save_evaluate": "Use a callback.",
    "_clip_grad_norm": "Use max_grad_norm.",
    "_get_grad_norm": "Leave it out: the norm is that of the step's whole gradient.",
}
"""Methods of the Trainer that are not called -> what to do instead."""

WITHIN_A_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
"""Events of callbacks that do not come: between a rank's micro-batches and within the commit."""


@functools.cache
def defaults() -> Any:
    """Arguments with their defaults. To make them resets the state of accelerate, so that is restored."""
    states = [kind._shared_state for kind in (AcceleratorState, PartialState)]
    before = [dict(state) for state in states]
    try:
        return TrainingArguments("trained", use_cpu=True)
    finally:
        for state, kept in zip(states, before, strict=True):
            state.clear()
            state.update(kept)


def check_arguments(args: Any) -> None:
    """Raises ConfigError for the first unsupported field of ``args``. Further fields of a subclass are allowed."""
    usual = defaults()
    for field in dataclasses.fields(TrainingArguments):
        value, default = getattr(args, field.name), getattr(usual, field.name)
        if field.name not in CARRIED and value != default:
            reason, way_out = OTHERWISE.get(field.name, ("the adapter was not tested with it", f"Leave it out: {default!r} is carried."))
            raise ConfigError(field.name, value, reason, way_out)
    optimizer, schedule = _name(args.optim), _name(args.lr_scheduler_type)
    if optimizer not in (*OPTIMIZERS, _name(usual.optim)):
        raise ConfigError("optim", optimizer, "the adapter was not tested with it", f"Choose {', '.join(OPTIMIZERS)}, or give optimizers=.")
    if schedule in PLATEAU:
        raise ConfigError("lr_scheduler_type", schedule, "step.commit() steps a schedule, and this one needs a figure", "Choose another.")
    if args.n_gpu > 1:
        raise ConfigError("n_gpu", args.n_gpu, "a rank has one GPU", "Use fleet run --gpus-per-rank 1.")


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))


def check_methods(kind: type, ours: type) -> None:
    """Raises ConfigError for the first method of ``kind``, a subclass of ``ours``, that would not be called."""
    for name, way_out in REPLACED.items():
        if getattr(kind, name) is not getattr(ours, name):
            raise ConfigError("Trainer", f"{kind.__qualname__}.{name}", "Fleet's loop does not call it", way_out)


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Raises ConfigError for the first callback that waits for an event which does not come."""
    for callback in callbacks:
        for event in WITHIN_A_STEP:
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                name = f"{type(callback).__qualname__}.{event}"
                reason = "no rank has the step's gradient outside of the commit, and ranks have unequally many micro-batches"
                raise ConfigError("callbacks", name, reason, "Use on_step_end, which comes once a step on each rank.")


def check_data(dataset: Any) -> None:
    """Raises ConfigError for samples that have no numbers."""
    if dataset is None:
        raise ConfigError("train_dataset", None, "there is nothing to train with", "Give one to the Trainer.")
    if isinstance(dataset, torch.utils.data.IterableDataset):
        reason = "its samples have no numbers, so no other rank can compute those of a lost one"
        raise ConfigError("train_dataset", type(dataset).__name__, reason, "Give a map-style dataset, or fleet.data.Streams.")


def check_run(run: Any, args: Any, batch_size: int) -> None:
    """Raises ConfigError where the run's settings do not go with the Trainer's."""
    sharding = run.config.optimizer_sharding
    if sharding == "fsdp":
        raise ConfigError("optimizer_sharding", sharding, "the Trainer saves a model that is whole", "Choose none or zero1.")
    if batch_size % run.shards:
        name = "per_device_train_batch_size * gradient_accumulation_steps"
        reason = f"it is the batch of a step, which is cut into {run.shards} shards of equal size"
        raise ConfigError(name, batch_size, reason, f"Use a multiple of {run.shards}, or fleet run --shards with a divisor of it.")
    if run.device.type != args.device.type:
        reason = f"the rank trains on {run.device.type}, and the Trainer on {args.device.type}"
        raise ConfigError("use_cpu", args.use_cpu, reason, "Set use_cpu=True, or use fleet run --gpus-per-rank 1.")
