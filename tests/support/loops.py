"""Loops as people write them, small, for what happens to them when ranks keep the model in chunks and are lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.support.trains import FEATURES, Numbers

WIDTH = 61
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Params = list[dict[str, Any]]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Its last layer has the weights of its first."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH, bias=False), nn.Linear(FEATURES, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x @ self.last.weight).sum(1, keepdim=True)


def cut(run: Any, model: nn.Module, **more: Any) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=run.mesh, **more)
    fully_shard(model, mesh=run.mesh, **more)


def groups(model: nn.Module) -> Params:
    """Matrices decay, and learn slower than the rest."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.ndim > 1], "lr": 2e-3, "weight_decay": 0.1},
        {"params": [each for each in trained if each.ndim < 2], "lr": 1e-2, "weight_decay": 0.0},
    ]


def halved(run: Any) -> tuple[nn.Module, Params]:
    """Blocks compute in bfloat16; the outermost unit in the type of its parameters, and gives float32."""
    model = Model()
    cut(run, model, mp_policy=HALF)
    return model, groups(model)


class Kept(nn.Module):
    """Computes its two layers again for the backward, which makes a backward of its own for each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[assignment]
        return x


class Checkpointing(Model):
    """One block is wrapped, one is computed again in each of the two ways from outside its unit, and one from inside, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([checkpoint_wrapper(Block()), Block(), Block(), Kept()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        x = checkpoint(self.blocks[1], x, use_reentrant=False)  # type: ignore[assignment]
        x = checkpoint(self.blocks[2], x, use_reentrant=True)  # type: ignore[assignment]
        return (self.blocks[3](x) @ self.last.weight).sum(1, keepdim=True)


def checkpointed(run: Any) -> tuple[nn.Module, Params]:
    model = Checkpointing()
    cut(run, model)
    return model, groups(model)


def checkpointed_half(run: Any) -> tuple[nn.Module, Params]:
    model = Checkpointing()
    cut(run, model, mp_policy=HALF)
    return model, groups(model)


def compiled_blocks(run: Any) -> tuple[nn.Module, Params]:
    """In both ways to write it."""
    model = Model(2)
    cut(run, model)
    model.blocks[0].compile(backend="aot_eager")
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")  # type: ignore[assignment]
    return model, groups(model)


def compiled_model(run: Any) -> tuple[nn.Module, Params]:
    model = Model(2)
    cut(run, model, mp_policy=HALF)
    found: Any = torch.compile(model, backend="aot_eager")
    return found, groups(model)


class Adapted(nn.Module):
    """A frozen layer, and what is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted(run: Any) -> tuple[nn.Module, Params]:
    """LoRA on half a model: all is frozen but the adapters, and units compute in bfloat16."""
    model = Model().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    cut(run, model, mp_policy=HALF)
    return model, groups(model)


BUILDS: dict[str, Callable[[Any], tuple[nn.Module, Params]]] = {
    build.__name__: build for build in (halved, checkpointed, checkpointed_half, compiled_blocks, compiled_model, adapted)
}


def average(optimizer: torch.optim.Optimizer, decay: float = 0.9) -> None:
    """Keep an average of the weights in the optimizer's state: after each step, for the elements that are there."""

    @torch.no_grad()
    def update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            state = optimizer.state[parameter]
            if "average" not in state:
                state["average"] = parameter.detach().clone()
            state["average"].lerp_(parameter.detach(), 1 - decay)

    optimizer.register_step_post_hook(update)


def train(run: Any) -> None:
    """Two backwards in each shard, of two forwards; and an average of the weights."""
    torch.manual_seed(3)
    model, params = BUILDS[run.options["build"]](run)
    optimizer = torch.optim.AdamW(params)
    average(optimizer)
    state = run.track(model=model, optimizer=optimizer)
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            for part, truth in zip(x.chunk(2), y.chunk(2), strict=True):
                step.backward((model(part).float() - truth).square().mean() / 2)
        time.sleep(0.01)
        step.commit()
    if run.is_main:
        Path(run.options["flags"], f"done-{os.getpid()}").touch()
