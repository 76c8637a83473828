"""The loop of gpt_fsdp.py in plain PyTorch, before its port to Fleet. When a rank is lost, the whole job ends.

torchrun --standalone --nproc-per-node 2 examples/gpt_fsdp_plain.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from gpt import Source, loss_fn
from gpt_fsdp import build
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler


def train(steps: int) -> None:
    data = Source()
    model, optimizer = build(init_device_mesh("cpu", (dist.get_world_size(),)))
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=DistributedSampler(data))
    for _, batch in zip(range(steps), loader, strict=False):
        loss_fn(model.train(), batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    dist.destroy_process_group()
