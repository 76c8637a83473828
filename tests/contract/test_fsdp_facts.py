"""What Fleet knows of the inside of PyTorch's ``fully_shard``, held against the PyTorch that is installed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from actors.rank.fsdp.taken import mesh_of_one, take_over
from fleet.errors import ConfigError

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


def cut(**policies: object) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    for part in (model.inner, model):
        fully_shard(part, mesh=mesh_of_one(CPU), **policies)  # type: ignore[arg-type]
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])


def test_a_model_that_was_taken_over_is_the_plain_model_again() -> None:
    torch.manual_seed(0)
    plain = Tied()
    model, optimizer = cut()
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


def test_nothing_of_fsdp_runs_in_it_any_more() -> None:
    """Its hooks would gather, and look for parameters that are cut."""
    model, optimizer = cut()
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
