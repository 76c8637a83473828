"""Lightning's ``Trainer`` on Fleet: ``from fleet.integrations.lightning import Trainer``. It needs the extra ``lightning``."""

from __future__ import annotations

from actors.rank.integrations.lightning_trainer import LightningTrainer as Trainer

__all__ = ["Trainer"]
