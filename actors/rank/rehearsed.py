"""The training of ranks in a rehearsal: a small model, and a timed wait that gives a step its length."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, SAMPLES = 64, 4_096


class Waves(torch.utils.data.Dataset[Tensor]):
    """Sample ``i`` is a pure function of ``i``."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(FEATURES, dtype=torch.float32) * (index % 97 + 1))


def train(run: Any) -> None:
    """Steps of ``run.options["wait_s"]`` and a little arithmetic, until the user ends the run."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = run.track(model=model, optimizer=optimizer)
    wait_s, data = float(run.options["wait_s"]), Waves()
    for step in run.steps(state, total=10**9):
        for batch in step.batches(data, batch_size=64):
            step.backward(((model(batch) - batch) ** 2).mean())
        time.sleep(wait_s)
        step.commit()
