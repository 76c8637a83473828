"""What Fleet knows of the inside of PyTorch's ``fully_shard``, held against the PyTorch that is installed."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from actors.rank.fsdp.gathered import cast_whole
from actors.rank.fsdp.taken import mesh_of_one, take_over
from fleet.errors import ConfigError
from fleet.protocol.topology import DIMENSIONS
from tests.support import loops

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


def test_the_parameters_that_were_cut_are_let_go() -> None:
    """FSDP2's state of a module lives as long as the module: with it they would be in memory once more, whole, on each rank."""
    model, optimizer = cut()
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    take_over({"model": model}, {"optimizer": optimizer})
    gc.collect()
    assert not [each for each in before if each() is not None]


def test_a_model_that_was_not_cut_is_left_alone() -> None:
    model = Tied()
    before = list(model.parameters())
    assert take_over({"model": model}, {}) == ()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def _recurrent() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.LSTM(3, 3))
    fully_shard(model, mesh=mesh_of_one(CPU), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model, torch.optim.AdamW(model.parameters())


def _tied_across_units() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied()
    for part in (model.head, model):
        fully_shard(part, mesh=mesh_of_one(CPU))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("kind", [loops.Model, loops.Checkpointing])
@pytest.mark.parametrize("outer", [loops.HALF_IN, dataclasses.replace(loops.HALF_IN, cast_forward_inputs=False), loops.HALF])
def test_a_policy_gives_the_bits_that_fsdp_gives(kind: type[nn.Module], outer: MixedPrecisionPolicy) -> None:
    """Of outputs and gradients, over two backwards that are added up; and the state has the parameters as they were."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
        loops.cut(mesh_of_one(CPU), models[-1], loops.HALF, outer)
    theirs, mine = models
    free = cast_whole(take_over({"model": mine}, {}))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    x = x if outer.cast_forward_inputs else x.bfloat16()
    for _ in range(2):
        expected, found = theirs(x), mine(x)
        assert torch.equal(expected, found)
        assert expected.dtype == found.dtype == (outer.output_dtype or torch.bfloat16)
        for each in (expected, found):
            each.float().square().mean().backward()
        assert {each.dtype for each in mine.state_dict().values()} == {torch.float32}
    free()
    assert mine.first.weight is mine.get_parameter("first.weight")
    for (name, parameter), (_, cut_up) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        if ".inner." not in name:  # reentrant checkpoints come twice to these, what FSDP adds up in bfloat16, and Fleet in float32
            assert torch.equal(parameter.grad, cut_up.grad.to_local()), name


def test_what_is_cast_is_cast_anew_once_the_parameters_have_changed() -> None:
    model = Tied()
    fully_shard(model, mesh=mesh_of_one(CPU), mp_policy=loops.HALF)
    free = cast_whole(take_over({"model": model}, {}))
    x = torch.arange(5)
    before = model(x)
    free()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2)
    assert not torch.equal(model(x), before)


def _stepped() -> tuple[Tied, torch.optim.Optimizer]:
    model, optimizer = cut()
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cut(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "reduce_dtype=torch.float32"),
        (lambda: cut(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), "reduce_dtype=torch.float32"),
        (lambda: cut(mp_policy=MixedPrecisionPolicy(torch.float8_e4m3fn, torch.float32)), "Choose param_dtype"),
        (_recurrent, "LSTM"),
        (_tied_across_units, "its parameter weight is tied to one of model"),
        (lambda: cut(offload_policy=CPUOffloadPolicy(pin_memory=False)), "CPUOffloadPolicy"),
        (_stepped, "it has state already"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], said: str) -> None:
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
