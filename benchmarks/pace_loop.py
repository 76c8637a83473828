"""The loop that `pace` runs at each commit with that commit's own `fleet run`.

This module imports nothing of Fleet, whose modules may have other names at another commit. Each rank asks the gate
(`benchmarks.pace_sides.StepGate`) before it begins a block of steps. For each commit it appends a line in the form of `peers.common`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ENDLESS = 1_000_000_000
FEATURES, HIDDEN, CLASSES = 512, 768, 64


def train(run: Any) -> None:
    begun_s = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    events, shards = Path(run.options["events"]), int(run.options["shards"])
    block, samples, wait_s = int(run.options["block"]), int(run.options["samples"]), float(run.options["wait_s"])
    model = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )  # 1.03 million parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = run.track(model=model, optimizer=optimizer)
    (events / f"{os.getpid()}.begun").write_text(json.dumps(begun_s))
    log = (events / f"{run.slot}-{os.getpid()}.log").open("a", buffering=1)
    numbers, allowed = list(range(shards)), -1
    gate = socket.socket(socket.AF_UNIX)
    gate.connect(run.options["gate"])
    for step in run.steps(state, total=ENDLESS):
        if step.number // block > allowed:
            allowed = step.number // block
            gate.sendall(f"{allowed} {os.getpid()}\n".encode())
            gate.recv(1)
        for _ in step.batches(numbers, batch_size=shards):
            loss = shard_loss(model, samples, step.number * shards + step.shard)
            if wait_s and step.shard == step.shards[-1]:
                time.sleep(wait_s)
            step.backward(loss)
        if step.commit():
            log.write(f"{time.monotonic():.6f} {step.number + 1} {shards * samples} commit {run.generation}\n")


def shard_loss(model: nn.Module, samples: int, number: int) -> torch.Tensor:
    """Mean loss of one shard, whose samples follow from its ``number``."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    loss: torch.Tensor = nn.functional.cross_entropy(model(inputs), torch.randint(CLASSES, (samples,), generator=generator))
    return loss
