"""Hugging Face's ``Trainer`` on Fleet: ``from fleet.integrations.transformers import Trainer``. It needs the extra ``transformers``."""

from __future__ import annotations

from actors.rank.integrations.hugging_face import TransformersTrainer as Trainer

__all__ = ["Trainer"]
