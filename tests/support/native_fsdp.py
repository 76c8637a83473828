"""Plain PyTorch FSDP2, as no part of Fleet: its own all-gather and reduce-scatter over gloo, on real processes."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.support.trains import FEATURES, Numbers, build

SHARDS, BATCH, STEPS = 8, 64, 6


def cut(mesh: Any) -> Any:
    def units(model: nn.Sequential) -> None:
        for each in (model[0], model[1], model):
            fully_shard(each, mesh=mesh)

    return units


def _rank(rank: int, world: int, store: Path, found: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    torch.manual_seed(0)
    model, optimizer, _ = build(1021, "layer", cut(init_device_mesh("cpu", (world,))))
    model.eval()  # no dropout: the only difference left is in which order gradients are added
    for each in (part for part in model.modules() if isinstance(part, FSDPModule)):
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    samples = [Numbers()[index] for index in range(BATCH)]
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    assert x.shape == (BATCH, FEATURES)
    shards = list(zip(x.chunk(SHARDS), y.chunk(SHARDS), strict=True))
    for _ in range(STEPS):
        for inputs, targets in shards[rank * SHARDS // world : (rank + 1) * SHARDS // world]:
            (((model(inputs) - targets) ** 2).mean() / SHARDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
    if rank == 0:
        found.put(digest.hexdigest())
    dist.destroy_process_group()


def digest_of(world: int, folder: Path) -> str:
    """Of the parameters after a few steps of ``world`` ranks, on the same samples at each world."""
    folder.mkdir()
    spawned = multiprocessing.get_context("forkserver")
    found = spawned.SimpleQueue()
    ranks = [spawned.Process(target=_rank, args=(rank, world, folder / f"store-{world}", found)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0] * world
    digest: str = found.get()
    return digest
