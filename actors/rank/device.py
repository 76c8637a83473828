"""The device that a rank trains on."""

from __future__ import annotations

import os

import torch

from fleet.errors import ConfigError
from fleet.settings.per_rank import VISIBLE


def rank_device(gpus: float) -> torch.device:
    """The GPU of a rank that has ``gpus`` of them (or that part of one); the CPU if ``gpus`` is 0.

    Raises:
        ConfigError: PyTorch sees no GPU. The rank would train on the CPU without notice.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = "has no CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} finds no driver or no device"
        reason = f"the rank has GPU {os.environ.get(VISIBLE, 'of unknown number')}, and PyTorch {torch.__version__} {why}"
        raise ConfigError("per_rank.gpus", gpus, reason, "Install PyTorch for CUDA there, see fleet doctor; or train on CPUs.")
    return torch.device("cuda", 0)
