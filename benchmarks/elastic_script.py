"""The script of the runs of `elastic` from which a node is taken: an MLP, and a timed wait in each shard.

Its ranks compute little, so a process that starts beside them on the same cores does not slow them. That is so on a fleet, too, where it
starts on another machine. The processor time of the start is measured apart.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import fleet

FEATURES, CLASSES, SAMPLES = 256, 16, 1024
SHARD_WAIT_S = 0.125
"""With two ranks and four shards a step takes a quarter of a second, and what the exchange takes."""


def train(run: fleet.Run) -> None:
    generator = torch.Generator().manual_seed(7)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, FEATURES, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator)
    )
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    state = run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in run.steps(state, total=int(run.options.get("steps", "300"))):
        for inputs, labels in step.batches(data, batch_size=64):
            time.sleep(SHARD_WAIT_S)
            step.backward(nn.functional.cross_entropy(model(inputs), labels))
        step.commit()
