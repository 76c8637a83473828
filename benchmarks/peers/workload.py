"""The one training step that every system runs: a real MLP, a calibrated compute, a timed wait, an all-reduce, AdamW.

The global batch is cut into ``Settings.shards`` shards. A rank's share at full world is ``rank_shards`` of them, each with its own forward
and backward. So systems that re-assign shards, and others, do the same arithmetic per sample.
Imported inside ranks only: it needs torch.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.peers.common import Settings
from fleet.simulation.rng import derive_seed

FEATURES, HIDDEN, CLASSES = 512, 768, 64


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An MLP of 1.03 M parameters (4.1 MB fp32) and its AdamW, equal on every rank; pins this process to one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(derive_seed(settings.seed, "model"))
    layers = [nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def shard_loss(model: nn.Module, settings: Settings, step: int, shard: int) -> torch.Tensor:
    """Mean loss of one shard; its samples are a pure function of (seed, step, shard)."""
    generator = torch.Generator().manual_seed(derive_seed(settings.seed, step, shard))
    inputs = torch.randn(settings.shard_samples, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (settings.shard_samples,), generator=generator)
    loss: torch.Tensor = nn.functional.cross_entropy(model(inputs), labels)
    return loss


def share_of(settings: Settings, slot: int) -> range:
    """The shards of a rank at full world."""
    return range(slot * settings.rank_shards, (slot + 1) * settings.rank_shards)


def backward_share(
    model: nn.Module,
    settings: Settings,
    step: int,
    shards: Sequence[int],
    no_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Forward and backward of ``shards``, with the timed wait before the last one, whose backward starts a DDP model's all-reduce."""
    with no_sync():
        for shard in shards[:-1]:
            (shard_loss(model, settings, step, shard) / len(shards)).backward()
    last = shard_loss(model, settings, step, shards[-1]) / len(shards)
    time.sleep(settings.wait_s)
    last.backward()


def cpu_s_per_share(settings: Settings, repetitions: int = 60) -> float:
    """Median CPU seconds of one rank's share at full world, without the wait. Other load on the machine does not change CPU time."""
    model, _ = build(settings)
    taken: list[float] = []
    for step in range(repetitions):
        begin = time.process_time()
        for shard in share_of(settings, 0):
            shard_loss(model, settings, step, shard).backward()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def calibrate(settings: Settings) -> int:
    """The samples per shard at which a rank's share takes ``compute_s`` of one core."""
    samples = settings.shard_samples
    for _ in range(3):
        measured_s = cpu_s_per_share(settings.replace(shard_samples=samples))
        samples = max(1, round(samples * settings.compute_s / measured_s))
    return samples


if __name__ == "__main__":
    print(calibrate(Settings.from_json(sys.argv[1])))
