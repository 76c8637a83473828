"""Loops as people write them, small, for what happens to them when ranks keep the model in chunks and are lost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from tests.support.trains import FEATURES, Numbers

WIDTH = 61
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF_IN = dataclasses.replace(HALF, output_dtype=torch.float32)
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


def cut(mesh: DeviceMesh, model: nn.Module, inner: MixedPrecisionPolicy | None = None, outer: MixedPrecisionPolicy | None = None) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=inner or MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=outer or MixedPrecisionPolicy())


def groups(model: nn.Module) -> Params:
    """Matrices decay, and learn slower than the rest."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.ndim > 1], "lr": 2e-3, "weight_decay": 0.1},
        {"params": [each for each in trained if each.ndim < 2], "lr": 1e-2, "weight_decay": 0.0},
    ]


def halved(run: Any) -> tuple[nn.Module, Params]:
    """All units compute in bfloat16, and the outermost gives float32."""
    model = Model()
    cut(run.mesh, model, HALF, HALF_IN)
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
    cut(run.mesh, model)
    return model, groups(model)


def checkpointed_half(run: Any) -> tuple[nn.Module, Params]:
    model = Checkpointing()
    cut(run.mesh, model, HALF, HALF_IN)
    return model, groups(model)


def compiled_blocks(run: Any) -> tuple[nn.Module, Params]:
    """In both ways to write it."""
    model = Model(2)
    cut(run.mesh, model)
    model.blocks[0].compile(backend="aot_eager")
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")  # type: ignore[assignment]
    return model, groups(model)


def compiled_model(run: Any) -> tuple[nn.Module, Params]:
    model = Model(2)
    cut(run.mesh, model, HALF, HALF_IN)
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


def scaled(run: Any) -> tuple[nn.Module, Params]:
    """In float16, for which losses are scaled; see :func:`train`."""
    model = Model()
    half = dataclasses.replace(HALF, param_dtype=torch.float16)
    cut(run.mesh, model, half, dataclasses.replace(half, output_dtype=torch.float32))
    return model, groups(model)


def adapted(run: Any) -> tuple[nn.Module, Params]:
    """LoRA on half a model: all is frozen but the adapters, and units compute in bfloat16."""
    model = Model().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    cut(run.mesh, model, HALF, HALF_IN)
    return model, groups(model)


BUILDS: dict[str, Callable[[Any], tuple[nn.Module, Params]]] = {
    build.__name__: build for build in (halved, checkpointed, checkpointed_half, compiled_blocks, compiled_model, adapted, scaled)
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


class Average:
    """By hand, with the whole weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.weights = model, {name: each.detach().clone() for name, each in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, each in self.model.named_parameters():
            self.weights[name].lerp_(each, 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = dict(state)


def mistaken(run: Any) -> None:
    """Tracks, or does, what cannot be had where ranks have the model in chunks."""
    torch.manual_seed(3)
    model, params = halved(run)
    optimizer = torch.optim.AdamW(params)
    by_hand, averaged, more = Average(model), AveragedModel(nn.Linear(1, 1)), dict[str, Any]()
    match run.options["mistake"]:
        case "average":
            more = {"average": by_hand}
        case "averaged model":
            more = {"average": averaged}
        case "second optimizer":
            more = {"second": torch.optim.SGD(model.parameters(), 0.1)}
    state = run.track(model=model, optimizer=optimizer, **more)
    for step in run.steps(state, total=4):
        for x, y in step.batches(Numbers(), batch_size=64):
            step.backward((model(x) - y).square().mean())
        step.on_commit(by_hand.update)
        step.commit()


def train(run: Any) -> None:
    """Two backwards in each shard, of two forwards; an average of the weights; an evaluation, and the model in a file."""
    torch.manual_seed(3)
    model, params = BUILDS[run.options["build"]](run)
    optimizer = torch.optim.AdamW(params)
    average(optimizer)
    more = {"scaler": torch.amp.GradScaler("cpu", init_scale=3e6)} if run.options["build"] == "scaled" else {}  # the first steps overflow
    state = run.track(model=model, optimizer=optimizer, **more)
    for step in run.steps(state, total=int(run.options["steps"]), clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            for part, truth in zip(x.chunk(2), y.chunk(2), strict=True):
                step.backward((model(part) - truth).square().mean() / 2)
        time.sleep(0.01)
        step.commit()
        run.evaluate(lambda: {"largest": float(model(torch.ones(1, FEATURES)).detach())}, every=4)
    run.save(Path(run.options["flags"]) / "model.pt")
