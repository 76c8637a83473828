"""What Fleet knows of the inside of PyTorch's ``fully_shard``, held against the PyTorch that is installed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from actors.rank.fsdp.taken import mesh_of_one, take_over
from fleet.errors import ConfigError
from fleet.protocol.topology import DIMENSIONS

CPU = torch.device("cpu")
ONE_AT_A_TIME = threading.Lock()


class Tied(nn.Module):
    """Its head has the embedding's weights, and one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 7), nn.Linear(7, 13, bias=False)
        self.inner = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        self.head.weight = self.embedding.weight
        self.inner[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x)))


def cut(dimensions: tuple[str, ...] = DIMENSIONS[-1:], **policies: object) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, mesh = Tied(), mesh_of_one(CPU, dimensions)
    for part in (model.inner, model):
        fully_shard(part, mesh=mesh, **policies)  # type: ignore[arg-type]
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])


MESHES = pytest.mark.parametrize("dimensions", [DIMENSIONS[-1:], DIMENSIONS], ids=["fsdp", "hsdp"])


@MESHES
def test_a_model_that_was_taken_over_is_the_plain_model_again(dimensions: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    plain = Tied()
    model, optimizer = cut(dimensions)
    units = take_over({"model": model}, {"optimizer": optimizer})
    assert [(unit.name, unit.keeps) for unit in units] == [("model", True), ("model.inner", False)]
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert type(model) is Tied
    assert type(model.inner) is nn.Sequential
    assert [type(each) for each in model.parameters()] == [nn.Parameter] * 5
    assert model.head.weight is model.embedding.weight
    assert [each.requires_grad for each in model.parameters()] == [each.requires_grad for each in plain.parameters()]
    for (name, mine), (other, theirs) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert (name, mine.tolist()) == (other, theirs.tolist())
    known = {id(each) for each in model.parameters()}
    assert all(id(each) in known for group in optimizer.param_groups for each in group["params"])


@MESHES
def test_nothing_of_fsdp_runs_in_it_any_more(dimensions: tuple[str, ...]) -> None:
    """Its hooks would gather, and look for parameters that are cut."""
    model, optimizer = cut(dimensions)
    take_over({"model": model}, {"optimizer": optimizer})
    x = torch.arange(5)
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]
    assert not hooks
    assert not [hook for module in model.modules() for hook in module._load_state_dict_post_hooks.values()]


def test_a_model_that_was_not_cut_is_left_alone() -> None:
    model = Tied()
    before = list(model.parameters())
    assert take_over({"model": model}, {}) == ()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def _stepped() -> tuple[Tied, torch.optim.Optimizer]:
    model, optimizer = cut()
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cut(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "torch.autocast"),
        (lambda: cut(offload_policy=CPUOffloadPolicy(pin_memory=False)), "CPUOffloadPolicy"),
        (_stepped, "it has state already"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(make: Callable[[], tuple[Tied, torch.optim.Optimizer]], said: str) -> None:
    model, optimizer = make()
    with pytest.raises(ConfigError) as refused:
        take_over({"model": model}, {"optimizer": optimizer})
    assert said in str(refused.value)


def test_a_mesh_of_this_rank_has_dimensions_by_name() -> None:
    mesh = mesh_of_one(CPU, DIMENSIONS)
    assert mesh.mesh_dim_names == ("replicate", "shard") and mesh.shape == (1, 1)
    assert mesh["shard"].size() == mesh["replicate"].size() == mesh_of_one(CPU)["shard"].size() == 1


OF_FOUR = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from actors.rank.fsdp.taken import take_over

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
take_over({"model": model}, {})
"""


def test_a_mesh_of_several_ranks_is_refused_with_its_shape_and_the_way_to_groups() -> None:
    """In a process of its own: the mesh is of PyTorch's process group that only looks like one of four ranks."""
    found = subprocess.run([sys.executable, "-c", OF_FOUR], check=False, capture_output=True, text=True, timeout=120)
    assert found.returncode
    last = found.stderr.strip().splitlines()[-1]
    assert all(words in last for words in ("its mesh has 2 x 2 ranks", "mesh=run.mesh", "replica_size=")), last
