"""For `tensor`: the train functions of Fleet's ranks and of PyTorch's own tensor parallelism with DDP over the replicas.

Both train one model, whose heads and middle layers :data:`PLAN` divides, on the same number of samples a replica, with one thread a rank.
They take blocks of steps in turns, see :mod:`benchmarks.mesh_ranks`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from benchmarks.device_ranks import BYTES, CONTEXT, HEADS, SEED, Text
from benchmarks.mesh_ranks import Memory, Turns, batches, train_through

TENSOR = 2
"""Ranks that compute a shard together."""
PLAN = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{name: RowwiseParallel() for name in ("out", "down")},
}


class Layer(nn.Module):
    """Attention and two linear layers. With ``parts`` it has so much less of both, as one rank of so many has."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        inner, self.head = width // parts, width // HEADS
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, inner) for _ in range(3))
        self.out = nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, 4 * inner), nn.Linear(4 * inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Predictor(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int, parts: int = 1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(Layer(width, parts) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss."""
        found = self.head(self.norm(self.layers(self.token(text[:, :-1]) + self.place.weight)))
        return nn.functional.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten())


def predictor(given: Mapping[str, str], mesh: DeviceMesh | None) -> Predictor:
    """The model, divided over ``mesh``. None: as a rank of :data:`TENSOR` has it, and without axes."""
    model = Predictor(int(given["width"]), int(given["layers"]), TENSOR if mesh is None else 1)
    for layer in model.layers if mesh is not None else ():
        parallelize_module(layer, mesh, PLAN)
    return model


def _of_run(run: Any) -> tuple[Predictor, torch.optim.Optimizer]:
    model = predictor(run.options, run.mesh["tensor"] if run.config.mesh else None)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def paired(run: Any) -> None:
    """Fleet's side."""
    options, last = run.options, int(run.options["steps"]) - 1
    memory, turns = Memory(options, "fleet", run.slot), Turns(options, "fleet", run.slot)
    model, optimizer = _of_run(run)
    data, batch = Text(), run.shards * int(options["samples"])
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=last + 1):
        if step.number == last:
            memory.write()
        turns.before(step.number)
        for text in step.batches(data, batch_size=batch):
            step.backward(model.train()(text))
        step.commit()


def native(given: Mapping[str, str], rank: int, world: int) -> None:
    """PyTorch's side."""
    _native(given, rank, world, TENSOR)


def plain(given: Mapping[str, str], rank: int, world: int) -> None:
    """PyTorch's side without axes."""
    _native(given, rank, world, 1)


def _native(given: Mapping[str, str], rank: int, world: int, tensor: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    memory, turns = Memory(given, "native", rank), Turns(given, "native", rank)
    dist.init_process_group("gloo", init_method=f"file://{given['folder']}/store", rank=rank, world_size=world)
    replicas = world // tensor
    mesh = init_device_mesh("cpu", (replicas, tensor), mesh_dim_names=("replica", "tensor"))
    model = predictor(given, mesh["tensor"] if tensor > 1 else None)
    if tensor > 1:
        _pre_dp_module_transform(model)
    wrapped = DistributedDataParallel(model, process_group=mesh["replica"].get_group())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for text in batches(given, mesh["replica"].get_local_rank(), replicas, memory, turns):
        wrapped.train()(text).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def with_faults(run: Any) -> None:
    train_through(run, *_of_run(run))
