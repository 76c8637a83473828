"""Fleet's ``Trainer`` of Hugging Face in one process: the weights, the log and the metrics of the real one, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from actors.rank.integrations.hugging_face import TESTED
from actors.rank.integrations.hugging_face_refused import CARRIED, OTHERWISE, REPLACED, WITHIN_A_STEP, check_arguments
from fleet.errors import ConfigError
from fleet.integrations.transformers import Trainer as FleetTrainer
from tests.support.hugging_face import IGNORED, Counted, Real, Rows, arguments, model, right_words, with_patience
from tests.zoo.harness import by_one_rank, one_thread

ROUNDING = 1e-9


def both(
    tmp_path: Path, shards: int, make: Callable[[type[Any], Path], Any], after: Callable[[Any], Any] = lambda trainer: None
) -> tuple[Any, Any]:  # fmt: skip
    """The real Trainer and Fleet's, trained; ``make`` is given the class and a folder."""
    with one_thread():
        real = make(Real, tmp_path / "real")
        real.train()
        after(real)
    made: list[Any] = []

    def train(run: Any) -> None:
        made.append(make(FleetTrainer, tmp_path / "fleet"))
        made[0].train()
        after(made[0])

    by_one_rank(train, shards, tmp_path)
    return real, made[0]


def alike(found: Any, right: Any) -> None:
    for (name, mine), its in zip(found.model.named_parameters(), right.model.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=ROUNDING, atol=ROUNDING), name
    assert found.state.global_step == right.state.global_step
    assert found.state.epoch == pytest.approx(right.state.epoch)
    for mine, its in zip(logs(found), logs(right), strict=True):
        assert of_the_model(mine) == pytest.approx(of_the_model(its))


def of_the_model(entry: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if not name.endswith(("runtime", "second", "time", "flos"))}


def logs(trainer: Any) -> list[dict[str, float]]:
    return list(trainer.state.log_history)


# ---- the same weights --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "accumulated", "shards", "means"), [(12, 1, 1, False), (3, 4, 4, False), (3, 4, 12, False), (3, 4, 4, True)]
)
def test_it_trains_what_the_real_one_trains(size: int, accumulated: int, shards: int, means: bool, tmp_path: Path) -> None:
    """A loss over tokens is that of the whole batch at any number of shards; a mean is that of each micro-batch."""
    counted: list[Counted] = []

    def make(kind: type[Any], folder: Path) -> Any:
        counted.append(Counted())
        args = arguments(folder, per_device_train_batch_size=size, gradient_accumulation_steps=accumulated)
        return kind(model(means), args, train_dataset=Rows(), callbacks=[counted[-1]])

    real, found = both(tmp_path, shards, make)
    alike(found, real)
    assert counted[1].events == counted[0].events
    assert counted[1].losses == pytest.approx(counted[0].losses) and len(counted[1].losses) == 8
    assert found.state.log_history[-1]["train_loss"] == pytest.approx(real.state.log_history[-1]["train_loss"])


def test_one_of_a_users_own_has_its_loss_its_optimizer_and_its_schedule(tmp_path: Path) -> None:
    def make(kind: type[Any], folder: Path) -> Any:
        class Own(kind):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
                found = model(**inputs)
                logits, labels = found["logits"].flatten(0, 1), inputs["labels"].flatten()
                loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
                loss = loss / (num_items_in_batch if num_items_in_batch is not None else labels.ne(IGNORED).sum())
                return (loss, found) if return_outputs else loss

            def create_optimizer(self, model: Any = None) -> Any:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
                return self.optimizer

            def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
                self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.3, total_steps=num_training_steps)
                return self.lr_scheduler

        args = arguments(folder, per_device_train_batch_size=6, gradient_accumulation_steps=2, max_grad_norm=0.0)
        return Own(model(), args, train_dataset=Rows())

    alike(*reversed(both(tmp_path, 4, make)))


def test_it_evaluates_saves_stops_early_and_has_the_best_model_in_the_end(tmp_path: Path) -> None:
    real, found = both(tmp_path, 4, with_patience, lambda trainer: trainer.save_model(str(Path(trainer.args.output_dir) / "saved")))
    assert real.state.global_step < 48, "the real one did not stop early"
    alike(found, real)
    assert found.state.best_metric == pytest.approx(real.state.best_metric)
    assert found.state.best_global_step == real.state.best_global_step
    names = [sorted(each.name for each in (tmp_path / kind).iterdir()) for kind in ("real", "fleet")]
    assert names[0] == names[1] and len(names[0]) == 3


def test_evaluations_between_epochs_and_by_hand_have_its_metrics(tmp_path: Path) -> None:
    by_hand: list[dict[str, float]] = []

    def make(kind: type[Any], folder: Path) -> Any:
        held_out = {"near": Rows(24, 500), "far": Rows(16, 900)}
        args = arguments(folder, eval_strategy="epoch", logging_strategy="epoch", label_smoothing_factor=0.0)
        return kind(model(), args, train_dataset=Rows(), eval_dataset=held_out, compute_metrics=right_words)

    alike(*reversed(both(tmp_path, 2, make, lambda trainer: by_hand.append(trainer.evaluate()))))
    assert by_hand[1].keys() >= {"eval_near_loss", "eval_far_right"}
    assert all(by_hand[1][name] == pytest.approx(by_hand[0][name]) for name in by_hand[0] if name.endswith(("loss", "right")))


def test_bf16_is_autocast_as_in_the_real_one(tmp_path: Path) -> None:
    def make(kind: type[Any], folder: Path) -> Any:
        return kind(model().float(), arguments(folder, bf16=True, max_grad_norm=0.0), train_dataset=Rows())

    real, found = both(tmp_path, 1, make)
    for mine, its in zip(found.model.parameters(), real.model.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-5, atol=1e-5)


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


def refused(make: Callable[[Any], Any], tmp_path: Path, shards: int = 4) -> ConfigError:
    def train(run: Any) -> None:
        make(run).train()

    with pytest.raises(ConfigError) as error:
        by_one_rank(train, shards, tmp_path)
    assert error.value.reason and error.value.way_out
    return error.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_sampling_strategy", "sequential"), ("data_seed", 5), ("auto_find_batch_size", True), ("torch_compile", True),
        ("include_num_input_tokens_seen", "all"), ("eval_on_start", True), ("full_determinism", True), ("save_on_each_node", True),
        ("accelerator_config", {"split_batches": True}), ("bf16_full_eval", True), ("ddp_timeout", 7), ("optim", "lomo"),
        ("lr_scheduler_type", "reduce_lr_on_plateau"), ("resume_from_checkpoint", "there"), ("push_to_hub", True),
    ],
)  # fmt: skip
def test_a_field_that_is_not_carried_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    more = {"eval_strategy": "epoch", "metric_for_best_model": "loss"} if field == "lr_scheduler_type" else {}
    found = refused(lambda run: FleetTrainer(model(), arguments(tmp_path, **{field: value}, **more), train_dataset=Rows()), tmp_path)
    assert found.field == field


def test_each_field_of_the_arguments_is_carried_or_is_refused_where_it_is_not_the_default() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields >= CARRIED | OTHERWISE.keys(), "fields that this version of transformers has not"
    assert not CARRIED & OTHERWISE.keys()
    check_arguments(TrainingArguments("out", use_cpu=True))


def test_methods_that_are_replaced_are_those_of_this_version() -> None:
    assert all(hasattr(Trainer, name) for name in REPLACED)


class Within(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...


class OwnLoader(FleetTrainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Rows())


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("callbacks", lambda folder: FleetTrainer(model(), arguments(folder), train_dataset=Rows(), callbacks=[Within()])),
        ("Trainer", lambda folder: OwnLoader(model(), arguments(folder), train_dataset=Rows())),
        ("train_dataset", lambda folder: FleetTrainer(model(), arguments(folder, max_steps=4), train_dataset=Stream())),
        ("train_dataset", lambda folder: FleetTrainer(model(), arguments(folder))),
        (
            "per_device_train_batch_size * gradient_accumulation_steps",
            lambda folder: FleetTrainer(model(), arguments(folder, per_device_train_batch_size=5), train_dataset=Rows()),
        ),
    ],
)
def test_what_fleets_loop_would_not_call_is_refused_by_name(field: str, make: Any, tmp_path: Path) -> None:
    assert refused(lambda run: make(tmp_path), tmp_path).field == field


def test_a_resume_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint = True: .* fleet run --resume RUN"):
        FleetTrainer(model(), arguments(tmp_path), train_dataset=Rows()).train(resume_from_checkpoint=True)


def test_the_page_names_all_that_is_refused_and_the_versions() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/transformers.md").read_text()
    names = [*OTHERWISE, *WITHIN_A_STEP, "get_train_dataloader", "_get_train_sampler", "get_batch_samples"]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert all(f"| {name} | {', '.join(tested)} |" in page for name, tested in TESTED.items())
