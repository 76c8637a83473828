"""An ordinary job of PyTorch: DDP over the digits that come with scikit-learn, with checkpoints of its own. It knows nothing of Fleet.

torchrun --standalone --nproc-per-node 2 examples/ddp_plain.py --steps 200
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def digits() -> TensorDataset:
    bunch = load_digits()
    return TensorDataset(torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target))


def save(path: Path, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Write to a temporary name first: a process that is killed while it writes leaves the last checkpoint."""
    unfinished = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, path)


def batches(data: TensorDataset, batch_size: int, first_step: int) -> Any:
    """Endless batches of this rank, from step ``first_step`` on. The samples of a batch depend on the step alone."""
    sampler = DistributedSampler(data, seed=0, drop_last=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)
    epoch, skip = divmod(first_step, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= skip:
                yield batch
        epoch, skip = epoch + 1, 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path, default=Path("ddp_plain.pt"))
    given = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if given.checkpoint.exists():
        state = torch.load(given.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"rank {rank} goes on from step {step}", flush=True)

    stream = batches(digits(), given.batch_size, step)
    while step < given.steps:
        images, labels = next(stream)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % given.print_every == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if rank == 0 and (step % given.save_every == 0 or step == given.steps):
            save(given.checkpoint, step, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
