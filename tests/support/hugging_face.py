"""Models, samples and scripts for the ``Trainer`` of Hugging Face, the real one and Fleet's. Imported where transformers may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from tests.support.fleets_order import InFleetsOrder

SAMPLES, LENGTH, WORDS, IGNORED = 96, 6, 19, -100


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample ``i`` is a pure function of ``i``. Samples have unequally many labels."""

    def __init__(self, samples: int = SAMPLES, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        number = index + self.first
        words = (torch.arange(LENGTH) * (number + 1) + number) % WORDS
        return {"words": words, "labels": torch.where(torch.arange(LENGTH) < 1 + number % LENGTH, words, IGNORED)}


class Words(nn.Module):
    """A model of tokens in float64. ``means``: it is given no ``num_items_in_batch``, and its loss is the mean of its batch."""

    def __init__(self, means: bool = False) -> None:
        super().__init__()
        self.accepts_loss_kwargs = not means
        self.inner = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS)).double()

    def forward(self, words: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.inner(words)
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


def model(means: bool = False) -> Words:
    """The same one each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Words(means)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """24 steps in three epochs: batches of twelve."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 12, "num_train_epochs": 3, "learning_rate": 0.05, "optim": "adamw_torch", "weight_decay": 0.01,
        "warmup_steps": 4, "logging_steps": 3, "save_strategy": "no", "use_cpu": True, "output_dir": str(folder), "disable_tqdm": True,
        "per_device_eval_batch_size": 8,
    }  # fmt: skip
    return TrainingArguments(**usual | more)


class Real(Trainer):
    """The real one, with Fleet's order of samples."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return InFleetsOrder(len(self.train_dataset), self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps)


class Counted(TrainerCallback, ExportableState):
    """Counts events, and keeps the losses that it was shown."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}
        self.losses: list[float] = []
        self.evaluated: list[tuple[int, float]] = []

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"evaluated": self.evaluated}}

    def _count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._count("epoch begins")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._count("epoch ends")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._count("step begins")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._count("step ends")

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._count("save")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
        self.evaluated.append([state.global_step, metrics["eval_loss"]])  # type: ignore[arg-type]


def right_words(predicted: Any) -> dict[str, float]:
    """``compute_metrics``."""
    found = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"right": float(found[predicted.label_ids != IGNORED].mean())}


def held_out_arguments(folder: Path) -> TrainingArguments:
    """48 steps at most: it stops early, and has saved the best model by then."""
    return arguments(
        folder, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True, num_train_epochs=6,
        metric_for_best_model="right", learning_rate=0.3, save_total_limit=2, max_grad_norm=0.0,
    )  # fmt: skip


def with_patience(kind: type[Any], folder: Path) -> Any:
    """A Trainer that stops when three evaluations in a row have found nothing better."""
    return kind(
        model(), held_out_arguments(folder), train_dataset=Rows(), eval_dataset=Rows(24, 500), compute_metrics=right_words,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )  # fmt: skip


def stops_early(run: Any) -> None:
    """A script's ``train``: the model is saved in the end."""
    from fleet.integrations.transformers import Trainer as FleetTrainer
    from tests.zoo.harness import arm

    if "kill" in run.options:
        arm(run)
    trainer = with_patience(FleetTrainer, Path(run.options["out"]))
    trainer.train()
    trainer.save_model(str(Path(run.options["out"]) / "saved"))
