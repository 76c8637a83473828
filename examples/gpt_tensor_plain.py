"""The loop of gpt_tensor.py in plain PyTorch, before its port to Fleet. When a rank is lost, the whole job ends.

torchrun --standalone --nproc-per-node 4 examples/gpt_tensor_plain.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from gpt import Source, loss_fn
from gpt_tensor_model import build
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler


def clip(gradients: list[torch.Tensor], norm: float) -> None:
    """``clip_grad_norm_`` takes DTensors or other tensors, and not both."""
    norms = [one.norm() for one in gradients]
    whole = torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in norms]).norm()
    for one in gradients:
        one *= min(1.0, norm / (float(whole) + 1e-6))


def train(mesh: DeviceMesh, steps: int) -> None:
    data = Source()
    model, optimizer = build(mesh["tensor"])
    replicas = mesh["replica"]
    sampler = DistributedSampler(data, replicas.size(), replicas.get_local_rank())
    for _, batch in zip(range(steps), DataLoader(data, batch_size=64 // replicas.size(), sampler=sampler), strict=False):
        loss_fn(model.train(), batch).backward()
        for parameter in model.parameters():
            part = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(part, group=replicas.get_group())
            part /= replicas.size()
        clip([one.grad for one in model.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train(init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replica", "tensor")), int([*sys.argv, "200"][1]))
    dist.destroy_process_group()
