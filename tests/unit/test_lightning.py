"""Fleet's Trainer of Lightning in one process: the weights and the checkpoints of the real one, and what it refuses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from actors.rank.integrations.lightning_manual import ByHand
from actors.rank.integrations.lightning_refused import BY_HAND, CARRIED, DONE, OTHERWISE, REPLACED
from actors.rank.integrations.lightning_trainer import TESTED
from actors.rank.step.step import Step
from fleet.errors import ConfigError
from fleet.integrations.lightning import Trainer as FleetTrainer
from tests.support.lightning_programs import Adversaries, Points, Regression, held_out, samples, trainer, with_patience
from tests.zoo.harness import by_one_rank, one_thread

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::UserWarning:lightning.*")
"""Lightning uses what PyTorch is about to drop, and would have more workers read a few samples."""

ROUNDING = 1e-9


def both(tmp_path: Path, shards: int, fit: Callable[[type[Any], Path], Any]) -> tuple[Any, Any]:
    """What ``fit`` gives with the real Trainer, and with Fleet's."""
    with one_thread():
        real = fit(Trainer, tmp_path / "real")
    made: list[Any] = []
    by_one_rank(lambda run: made.append(fit(FleetTrainer, tmp_path / "fleet")), shards, tmp_path)
    return real, made[0]


def alike(found: Any, right: Any) -> None:
    for (name, mine), its in zip(found.named_parameters(), right.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=ROUNDING, atol=ROUNDING), name


class Counted(Callback):
    """Counts events."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.events[name] = self.events.get(name, 0) + 1

    def on_train_epoch_start(self, *given: Any) -> None:
        self._count("epoch starts")

    def on_train_epoch_end(self, *given: Any) -> None:
        self._count("epoch ends")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._count(f"validated after {trainer.global_step}, in epoch {trainer.current_epoch}")

    def on_train_end(self, *given: Any) -> None:
        self._count("end")


@pytest.mark.parametrize(
    ("size", "accumulated", "shards", "more"),
    [
        (12, 1, 1, {}), (3, 4, 4, {"gradient_clip_val": 0.5}), (6, 2, 12, {"max_steps": 13}), (12, 1, 2, {"check_val_every_n_epoch": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("epochs", [False, True])
def test_it_trains_what_the_real_one_trains(
    size: int, accumulated: int, shards: int, more: dict[str, Any], epochs: bool, tmp_path: Path
) -> None:
    counted: list[Counted] = []

    def fit(kind: type[Any], folder: Path) -> Any:
        counted.append(Counted())
        module = Regression(epochs)
        made = trainer(kind, folder, accumulate_grad_batches=accumulated, callbacks=[counted[-1]], **more)
        made.fit(module, samples(kind, size, accumulated), held_out())
        return made, module

    real, found = both(tmp_path, shards, fit)
    alike(found[1], real[1])
    assert found[0].global_step == real[0].global_step
    assert float(found[0].callback_metrics["val_loss"]) == pytest.approx(float(real[0].callback_metrics["val_loss"]))
    assert counted[1].events == counted[0].events


@pytest.mark.parametrize(("shards", "make"), [(4, lambda: None), (1, Adversaries)])
def test_it_stops_early_and_keeps_the_best_checkpoint(shards: int, make: Callable[[], Any], tmp_path: Path) -> None:
    real, found = both(tmp_path, shards, lambda kind, folder: with_patience(kind, folder, make()))
    assert real[0].current_epoch < 19, "the real one did not stop early"
    assert found[0].global_step == real[0].global_step
    alike(found[1], real[1])
    paths = [Path(each.checkpoint_callback.best_model_path) for each in (real[0], found[0])]
    assert paths[0].name == paths[1].name and paths[1].parent == tmp_path / "fleet" / "kept"
    kept = [torch.load(path, weights_only=False)["state_dict"] for path in paths]
    assert all(torch.allclose(kept[1][name], value, rtol=ROUNDING, atol=ROUNDING) for name, value in kept[0].items())


# ---- several optimizers ------------------------------------------------------------------------------------------------------------------


def fitted(kind: type[Any], folder: Path, module: Any, size: int = 12, **more: Any) -> tuple[Any, Any]:
    made = trainer(kind, folder, **more)
    made.fit(module, samples(kind, size), held_out())
    return made, module


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({}, {}),
        ({"frozen": False, "clip": 0.1}, {"max_steps": 33}),
        ({"critics": 3, "retains": True}, {"val_check_interval": 4, "max_epochs": 2}),
    ],
)
def test_it_trains_with_several_optimizers_what_the_real_one_trains(given: Any, more: Any, tmp_path: Path) -> None:
    """A batch in one piece, as its networks have statistics of batches. They count each forward once, as in the real one."""
    counted: list[Counted] = []

    def fit(kind: type[Any], folder: Path) -> Any:
        counted.append(Counted())
        return fitted(kind, folder, Adversaries(**given), callbacks=[counted[-1]], **more)

    real, found = both(tmp_path, 1, fit)
    alike(found[1], real[1])
    for (name, mine), its in zip(found[1].named_buffers(), real[1].buffers(), strict=True):
        assert torch.allclose(mine, its, rtol=ROUNDING, atol=ROUNDING), name
    assert found[0].global_step == real[0].global_step > 30
    assert float(found[0].callback_metrics["val_loss"]) == pytest.approx(float(real[0].callback_metrics["val_loss"]))
    assert counted[1].events == counted[0].events
    rates = [[each.get_last_lr() for each in one.lr_schedulers()] for one in (found[1], real[1])]
    assert rates[0] == rates[1] and len(set(map(tuple, rates[0]))) == 2


class Pair(LightningModule):
    """Two networks, each with its optimizer, and a schedule of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.first, self.second = torch.nn.Linear(4, 1).double(), torch.nn.Linear(1, 1).double()

    def loss(self, batch: Any) -> Any:
        return torch.nn.functional.mse_loss(self.second(self.first(batch[0]).sin()), batch[1])

    def learn(self, loss: Any, *optimizers: Any, **more: Any) -> None:
        self.zero_grad()
        self.manual_backward(loss, **more)
        for each in optimizers:
            each.step()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch) * (1 + 0.01 * self.global_step)
        self.learn(loss, *self.optimizers())
        self.learn(self.loss(batch) * (1 + 0.01 * self.global_step) * (2 if self.trainer.is_last_batch else 1), self.optimizers()[1])
        self.lr_schedulers().step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (self.first, self.second)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[1], 2, gamma=0.8)]


def test_optimizers_that_learn_from_one_loss_take_one_step(tmp_path: Path) -> None:
    real, found = both(tmp_path, 4, lambda kind, folder: fitted(kind, folder, Pair(), max_epochs=2))
    alike(found[1], real[1])
    assert found[0].global_step == real[0].global_step == 48
    assert found[1].lr_schedulers().state_dict() == real[1].lr_schedulers().state_dict()


def test_a_rank_without_a_shard_comes_to_the_same_schedules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It follows training_step with a batch that it has, and with the counters of the step."""
    run, followed = ByHand.run, list[int]()

    def forgets(self: ByHand, number: int, batch: Any, batch_idx: int, backward: Any) -> None:
        run(self, number, batch, batch_idx, backward)
        if isinstance(getattr(backward, "__self__", None), Step):
            self.due, self._noted = [], (-1, [])
        else:
            followed.append(number)

    made = [fitted_on_fleet(tmp_path / "usual")]
    monkeypatch.setattr(ByHand, "run", forgets)
    made.append(fitted_on_fleet(tmp_path / "followed"))
    assert followed == list(range(48))
    states = [one.state_dict() | {"rates": torch.tensor([each.get_last_lr() for each in one.lr_schedulers()])} for one in made]
    assert len(set(states[0]["rates"].flatten().tolist())) == 2
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_weights_that_autocast_has_cast_are_those_of_now(tmp_path: Path) -> None:
    """Autocast keeps what it has cast: a loss behind an optimizer's step looked as if it had kept the weights ahead of it."""

    class Halved(Adversaries):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step([each.float() for each in batch], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step([each.float() for each in batch], batch_idx)

    module = Halved(frozen=False).float()
    run = by_one_rank(lambda run: fitted(FleetTrainer, tmp_path, module, precision="bf16-mixed", max_epochs=1), 4, tmp_path)
    assert len(run.losses) == 16


def fitted_on_fleet(folder: Path) -> Any:
    folder.mkdir()
    module = Adversaries(noisy=True)
    by_one_rank(lambda run: fitted(FleetTrainer, folder, module), 4, folder)
    return module


@pytest.mark.parametrize("given", [{}, {"critics": 2, "frozen": False}])
def test_more_shards_draw_the_same_noise_for_all_steps_of_a_batch(given: Any, tmp_path: Path) -> None:
    """Within a batch each step finds the same samples and random numbers; the next one finds others."""
    seen: list[tuple[int, float, float]] = []

    class Seen(Adversaries):
        def forged(self, real: Any) -> Any:
            if self.training and self.trainer.fit_loop._data_fetcher is not None:
                seen.append((self.trainer.fit_loop.epoch_loop.batch_progress.total.ready, float(real.sum()), float(torch.rand(()))))
            return super().forged(real)

    made = Seen(noisy=True, **given)
    run = by_one_rank(lambda run: fitted(FleetTrainer, tmp_path, made, max_epochs=1), 2, tmp_path)
    turns = given.get("critics", 1) + 1
    assert len(run.losses) == 8 * turns
    by_batch = {batch: {entry[1] for entry in seen if entry[0] == batch} for batch in range(1, 8)}
    assert {len(each) for each in by_batch.values()} == {2}, "each shard has its samples, and all steps have the same"
    assert len(set.union(*by_batch.values())) == 14


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


def refused(fit: Callable[[], Any], tmp_path: Path, shards: int = 4) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        by_one_rank(lambda run: fit(), shards, tmp_path)
    assert error.value.reason and error.value.way_out
    return error.value


def closes(self: Any, batch: Any, batch_idx: int) -> None:
    self.optimizers()[0].step(lambda: self.manual_backward(self.loss(batch)))


def chooses(self: Any, batch: Any, batch_idx: int) -> None:
    self.learn(self.loss(batch), *self.optimizers(), inputs=list(self.first.parameters()))


def clips_values(self: Any, batch: Any, batch_idx: int) -> None:
    self.clip_gradients(self.optimizers()[0], gradient_clip_val=0.1, gradient_clip_algorithm="value")


def changes_gradients(self: Any, batch: Any, batch_idx: int) -> None:
    self.learn(self.loss(batch))
    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
    self.optimizers()[0].step()


def clears_no_gradient(self: Any, batch: Any, batch_idx: int) -> None:
    for each in self.optimizers():
        self.manual_backward(self.loss(batch))
        each.step()


def learns_past_lightning(self: Any, batch: Any, batch_idx: int) -> None:
    self.loss(batch).backward()
    self.optimizers()[0].step()


def steps_past_lightning(self: Any, batch: Any, batch_idx: int) -> None:
    self.learn(self.loss(batch), *self.optimizers(use_pl_optimizer=False))


def accumulates(self: Any, batch: Any, batch_idx: int) -> None:
    self.learn(self.loss(batch), *(self.optimizers() if batch_idx % 2 else ()))


def changes_its_mind(self: Any, batch: Any, batch_idx: int) -> None:
    self.learn(self.loss(batch), *self.optimizers()[:: -1 if batch_idx == 2 else 1])


def steps_one(self: Any, batch: Any, batch_idx: int) -> None:
    self.learn(self.loss(batch), self.optimizers()[0])


def schedules_ahead(self: Any, batch: Any, batch_idx: int) -> None:
    self.lr_schedulers().step()
    Pair.training_step(self, batch, batch_idx)


def keeps(self: Any, batch: Any, batch_idx: int) -> None:
    made = self.first(batch[0]).sin()
    first, second = self.optimizers()
    self.learn(torch.nn.functional.mse_loss(self.second(made), batch[1]), first)
    self.learn(torch.nn.functional.mse_loss(self.second(made.detach()), batch[1]), second)


@pytest.mark.parametrize(
    ("field", "value", "step"),
    [
        ("optimizer.step", "closure", closes),
        ("manual_backward", "inputs", chooses),
        ("clip_gradients", "value", clips_values),
        ("training_step", DONE["gradients"], changes_gradients),
        ("training_step", DONE["zero_grad"], clears_no_gradient),
        ("training_step", DONE["no backward"], learns_past_lightning),
        ("optimizers", DONE["optimizers"], steps_past_lightning),
        ("training_step", DONE["no step"], accumulates),
        ("training_step", DONE["others"], changes_its_mind),
        ("configure_optimizers", "SGD", steps_one),
        ("lr_scheduler.step", DONE["schedule order"], schedules_ahead),
        ("training_step", "loss 2 is 1.54882, and 1.63172 from the top", keeps),
    ],
)
def test_what_cannot_be_done_by_hand_is_refused_by_name(field: str, value: str, step: Callable[..., None], tmp_path: Path) -> None:
    made = type("Odd", (Pair,), {"training_step": step})()
    before = copy.deepcopy(made.state_dict())
    error = refused(lambda: fitted(FleetTrainer, tmp_path, made), tmp_path)
    assert (error.field, error.value) == (field, value)
    if step is not changes_its_mind:  # which is seen in the third batch
        assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_a_hook_that_steps_a_schedule_is_refused(tmp_path: Path) -> None:
    class Late(Pair):
        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step()

    error = refused(lambda: fitted(FleetTrainer, tmp_path, Late()), tmp_path)
    assert (error.field, error.value) == ("lr_scheduler.step", "on_train_epoch_end")


def test_samples_of_half_a_batch_are_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"left_out = '4:7': 2 steps have the samples of one batch"):
        by_one_rank(lambda run: fitted(FleetTrainer, tmp_path, Adversaries()), 4, tmp_path, left_out=["4:7"])


@pytest.mark.parametrize("more", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_what_lightning_refuses_by_hand_is_refused_here(more: Any, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="manual optimization"):
        by_one_rank(lambda run: fitted(FleetTrainer, tmp_path, Pair(), **more), 4, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "ddp"), ("devices", 4), ("num_nodes", 2), ("precision", "16-mixed"), ("fast_dev_run", True),
        ("max_time", "00:01:00:00"),
        ("gradient_clip_algorithm", "value"), ("sync_batchnorm", True), ("limit_train_batches", 3), ("overfit_batches", 2),
        ("profiler", "simple"), ("deterministic", True), ("val_check_interval", "0:01:00:00"), ("nothing", 1),
    ],
)  # fmt: skip
def test_an_argument_that_is_not_carried_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    assert refused(lambda: FleetTrainer(**{field: value}), tmp_path).field == field


class WithoutSteps(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithoutAny(Regression):
    def configure_optimizers(self) -> Any:
        return None


class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Clips(Regression):
    def configure_gradient_clipping(self, *given: Any, **named: Any) -> None: ...


class Looks(Callback):
    def on_after_backward(self, *given: Any) -> None: ...


class Skips(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("field", "module", "more", "loader"),
    [
        ("training_step", WithoutSteps, {}, None),
        ("configure_optimizers", WithoutAny, {}, None),
        ("lr_scheduler", Plateau, {}, None),
        ("Clips", Clips, {}, None),
        ("training_step", Skips, {}, None),
        ("Looks", Regression, {"callbacks": [Looks()]}, None),
        ("train_dataloaders", Regression, {}, DataLoader(Points(), batch_size=12)),
        ("batch_size * accumulate_grad_batches", Regression, {}, DataLoader(Points(), batch_size=6, shuffle=True)),
        ("val_check_interval", Regression, {"accumulate_grad_batches": 2, "val_check_interval": 3}, None),
    ],
)
def test_what_fleets_loop_would_not_do_is_refused_by_name(field: str, module: Any, more: Any, loader: Any, tmp_path: Path) -> None:
    def fit() -> None:
        trainer(FleetTrainer, tmp_path, **more).fit(module(), loader or samples(FleetTrainer), held_out())

    assert refused(fit, tmp_path).field == field


def test_a_resume_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ckpt_path = 'last': .* fleet run --resume RUN"):
        trainer(FleetTrainer, tmp_path).fit(Regression(), samples(FleetTrainer), ckpt_path="last")


def test_a_figure_of_training_is_none_to_stop_by(tmp_path: Path) -> None:
    """One rank alone would know it."""

    def train(run: Any) -> None:
        made = trainer(FleetTrainer, tmp_path, callbacks=[EarlyStopping("train_loss")])
        made.fit(Regression(), samples(FleetTrainer), held_out())

    with pytest.raises(RuntimeError, match="train_loss"):
        by_one_rank(train, 4, tmp_path)


def test_names_are_those_of_this_version_and_the_page_has_them() -> None:
    arguments = set(inspect.signature(Trainer.__init__).parameters)
    assert arguments >= CARRIED | OTHERWISE.keys() and not CARRIED & OTHERWISE.keys()
    assert all(hasattr(LightningModule, name) for name in REPLACED)
    page = (Path(__file__).resolve().parents[2] / "docs/lightning.md").read_text()
    assert [name for name in (*OTHERWISE, *REPLACED) if f"`{name}`" not in page] == []
    named = {field for field, _, _ in BY_HAND.values()}
    assert [name for name in named if f"`{name}`" not in page] == []
    assert all(f"Tested with {name} {', '.join(tested)};" in page for name, tested in TESTED.items())
