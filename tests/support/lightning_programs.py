"""Modules, samples and scripts for Lightning's Trainer, the real one and Fleet's. Imported where Lightning may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.fleets_order import InFleetsOrder

SAMPLES, BATCH = 96, 12


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Sample ``i`` is a pure function of ``i``."""

    def __init__(self, samples: int = SAMPLES, seed: int = 1) -> None:
        self.x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum().sin().reshape(1)


class Regression(LightningModule):
    """In float64. ``epochs``: its schedule is stepped once an epoch, and else once a step."""

    def __init__(self, epochs: bool = False, rate: float = 0.05) -> None:
        super().__init__()
        self.epochs, self.rate = epochs, rate
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1 if self.epochs else 5, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch" if self.epochs else "step"}}


class Adversaries(LightningModule):
    """Two networks against each other, in float64, each with its optimizer and its schedule: ``critics`` steps of the one, and then one.

    Noise follows from the batch, or with ``noisy`` from torch's generator. With ``frozen`` parameters are toggled, as Lightning has it.
    """

    def __init__(self, critics: int = 1, frozen: bool = True, noisy: bool = False, clip: float = 0.0, retains: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critics, self.frozen, self.noisy, self.clip, self.retains = critics, frozen, noisy, clip, retains
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()
            self.critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).double()

    def forged(self, real: Tensor) -> Tensor:
        made: Tensor = self.generator(torch.randn_like(real[:, :2]) if self.noisy else (3 * real[:, :2]).cos())
        return made

    def judged(self, samples: Tensor, right: float) -> Tensor:
        found = self.critic(samples)
        return nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, right))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real = batch[0]
        forging, judging = self.optimizers()
        for _ in range(self.critics):
            self._judge(judging, real)
        if self.frozen:
            self.toggle_optimizer(forging)
        loss = self.judged(self.forged(real), 1.0)
        self.log("forged", loss)
        if not self.frozen:
            forging.zero_grad()
        self.manual_backward(loss)
        forging.step()
        if self.frozen:
            forging.zero_grad()
            self.untoggle_optimizer(forging)
        if self.trainer.is_last_batch:
            for schedule in self.lr_schedulers():
                schedule.step()

    def _judge(self, judging: Any, real: Tensor) -> None:
        if self.frozen:
            self.toggle_optimizer(judging)
        judging.zero_grad()
        forged = self.forged(real).detach()
        first, second = self.judged(real, 1.0), self.judged(forged, 0.0)
        self.manual_backward(first, retain_graph=self.retains)
        self.manual_backward(second)
        self.log("judged", first + second)
        if self.clip:
            self.clip_gradients(judging, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        judging.step()
        if self.frozen:
            self.untoggle_optimizer(judging)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.judged(self.forged(batch[0]), 1.0))

    def configure_optimizers(self) -> Any:
        forging = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999))
        judging = torch.optim.SGD(self.critic.parameters(), lr=0.3, momentum=0.5)
        return [forging, judging], [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.7) for each in (forging, judging)]


def held_out() -> DataLoader[Any]:
    return DataLoader(Points(24, 2), batch_size=8)


def samples(kind: type[Any], size: int = BATCH, accumulated: int = 1) -> DataLoader[Any]:
    """For the real Trainer in Fleet's order, for Fleet's as people write it."""
    if kind is Trainer:
        return DataLoader(Points(), batch_size=size, sampler=InFleetsOrder(SAMPLES, size * accumulated))
    return DataLoader(Points(), batch_size=size, shuffle=True)


def trainer(kind: type[Any], folder: Path, **more: Any) -> Any:
    usual: dict[str, Any] = {
        "max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_model_summary": False, "enable_progress_bar": False,
        "default_root_dir": folder, "num_sanity_val_steps": 0, "enable_checkpointing": False,
    }  # fmt: skip
    return kind(**usual | more)


def with_patience(kind: type[Any], folder: Path, module: LightningModule | None = None) -> tuple[Any, Any]:
    """(Trainer, module), fitted: it stops when three validations in a row have found nothing better, and has kept the best."""
    module = module or Regression(rate=0.9)
    callbacks = [EarlyStopping("val_loss", patience=3), ModelCheckpoint(folder / "kept", monitor="val_loss", filename="{epoch}-{step}")]
    made = trainer(kind, folder, max_epochs=20, callbacks=callbacks, val_check_interval=4, enable_checkpointing=True)
    made.fit(module, samples(kind), held_out())
    return made, module


def stops_early(run: Any) -> None:
    """A script's ``train``: the best checkpoint is named in a file in the end. With the option ``by=hand`` its optimizers are two."""
    from fleet.integrations.lightning import Trainer as FleetTrainer
    from tests.zoo.harness import arm

    if "kill" in run.options:
        arm(run)
    folder = Path(run.options["out"])
    by_hand = run.options.get("by") == "hand"
    made, module = with_patience(FleetTrainer, folder, Adversaries(noisy=True, clip=0.5) if by_hand else None)
    run.save(folder / "last.pt", module)
    run.once(lambda: (folder / "best").write_text(Path(made.checkpoint_callback.best_model_path).name))
