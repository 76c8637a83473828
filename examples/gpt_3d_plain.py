"""The loop of gpt_3d.py in plain PyTorch, before its port to Fleet. When a rank is lost, the whole job ends.

torchrun --standalone --nproc-per-node 8 examples/gpt_3d_plain.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from gpt import Source
from gpt_3d_model import build, loss_fn, optimizer_of
from gpt_tensor_plain import clip
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, DistributedSampler

SHARDS, STAGES = 8, 2


def train(mesh: DeviceMesh, steps: int) -> None:
    data = Source()
    model = build(mesh["tensor"])
    place, replicas = mesh["stage"].get_local_rank(), mesh["replica"]
    model = model[len(model) * place // STAGES : len(model) * (place + 1) // STAGES]
    pipe = Schedule1F1B(PipelineStage(model, place, STAGES, torch.device("cpu"), group=mesh["stage"].get_group()), SHARDS, loss_fn)
    optimizer = optimizer_of(model)
    sampler = DistributedSampler(data, replicas.size(), replicas.get_local_rank())
    for _, text in zip(range(steps), DataLoader(data, batch_size=64 // replicas.size(), sampler=sampler), strict=False):
        pipe.step(text[:, :-1]) if place == 0 else pipe.step(target=text)
        for parameter in model.parameters():
            part = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(part, group=replicas.get_group())
            part /= replicas.size()
        clip([one.grad for one in model.parameters()], 1.0)  # of one stage
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    shape, names = (dist.get_world_size() // 2 // STAGES, STAGES, 2), ("replica", "stage", "tensor")
    train(init_device_mesh("cpu", shape, mesh_dim_names=names), int([*sys.argv, "200"][1]))
    dist.destroy_process_group()
