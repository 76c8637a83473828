"""A mixture of experts, each of which one rank of a group has: tokens go to their experts and back by all-to-all.

Each rank takes a part of the tokens. In the plain loop one process has all experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.usual import Usual, rows

WIDTH, EXPERTS = 6, 4
DATA = rows(WIDTH, 72)


class Experts(nn.Module):
    """Each token goes to the expert of its largest score, and its result is multiplied with that score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(WIDTH, EXPERTS))
        self.weights = nn.Parameter(0.5 * torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        score, chosen = (x @ self.router).softmax(1).max(1)
        found = torch.stack([torch.tanh(token @ self.weights[int(expert)]) for token, expert in zip(x, chosen, strict=True)])
        return found * score[:, None]


class SpreadExperts(Experts):
    """The same, whose experts are spread over the ranks of ``mesh``."""

    def __init__(self, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        super().__init__()
        self._mesh = mesh
        self.router = nn.Parameter(distribute_tensor(self.router.detach(), mesh, [Replicate()]))
        self.weights = nn.Parameter(distribute_tensor(self.weights.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        mesh, ranks = self._mesh, self._mesh.size()
        tokens = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        score, chosen = (tokens @ self.router.to_local(grad_placements=[Partial()])).softmax(1).max(1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=EXPERTS).view(ranks, -1)
        received = exchanged(sent, [1] * ranks, [1] * ranks, mesh)
        there, back = received.sum(1).tolist(), sent.sum(1).tolist()
        arrived = exchanged(tokens[order], there, back, mesh)
        mine = torch.arange(EXPERTS // ranks).repeat(ranks).repeat_interleave(received.flatten())
        weights = self.weights.to_local()
        done = torch.cat(
            [torch.tanh(token[None] @ weights[int(expert)]) for token, expert in zip(arrived, mine, strict=True)] + [arrived[:0]]
        )
        found = exchanged(done, back, there, mesh)[order.argsort()] * score[:, None]
        return DTensor.from_local(found, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()


def exchanged(rows_of: Tensor, received: list[int], sent: list[int], mesh: Any) -> Tensor:
    """The rows that this rank gets: so many go to each rank, and so many come."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(rows_of, received, sent, mesh.get_group())


def build(options: Mapping[str, str], mesh: Any = None) -> dict[str, Any]:
    torch.manual_seed(72)
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float64)
        try:
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts() if mesh is None else SpreadExperts(mesh), nn.Linear(WIDTH, 1))
        finally:
            torch.set_default_dtype(torch.float32)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def loss_of(model: nn.Module, batch: Tensor, step: int) -> Tensor:
    return (model(batch).squeeze(1) - batch.sum(1)).square().mean()


LOOP = Usual(build, loss_of, DATA, together=True)
