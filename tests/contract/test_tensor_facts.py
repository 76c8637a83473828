"""What Fleet knows of the inside of PyTorch's tensor parallelism, held against the PyTorch that is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from actors.rank.mesh.local_steps import on_local_memory
from actors.rank.mesh.parts import is_whole, local
from actors.rank.mesh.torch_group import TensorGroup, mesh_of
from fleet.errors import ConfigError, FleetError
from tests.support.plain import FORKED

CPU, SIZE, WIDTH = torch.device("cpu"), 2, 4
LIMIT_S = 120.0


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a process of its own: PyTorch's default group is one of a process."""
    with ProcessPoolExecutor(1, mp_context=FORKED) as pool:
        return pool.submit(function, *arguments).result(LIMIT_S)


def in_ranks(function: Callable[[int], Any]) -> list[Any]:
    """The result of each of :data:`SIZE` ranks that never meet."""
    return [alone(function, rank) for rank in range(SIZE)]


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))


def divided(rank: int) -> tuple[TensorGroup, nn.Module]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    group, both = mesh_of(rank, SIZE, CPU, "tensor")
    mesh = both["tensor"]
    return group, parallelize_module(wide(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def own_parts(rank: int) -> dict[str, Any]:
    group, model = divided(rank)
    assert dist.get_rank() == rank and dist.get_world_size() == SIZE and group.lost == ""
    return {name: value.to_local().detach().numpy() for name, value in model.state_dict().items() if hasattr(value, "to_local")}


def test_each_rank_takes_its_own_part_and_no_message_is_sent() -> None:
    """``mesh_scatter`` and ``mesh_broadcast`` of DTensor are the two functions that would send one."""
    parts, plain = in_ranks(own_parts), {name: value.detach() for name, value in wide().state_dict().items()}
    for name, axis in (("0.weight", 0), ("0.bias", 0), ("1.weight", 1)):
        whole = torch.cat([torch.from_numpy(part[name]) for part in parts], dim=axis)
        assert torch.equal(whole, plain[name])
    assert all(torch.equal(torch.from_numpy(part["1.bias"]), plain["1.bias"]) for part in parts)


def goes_alone(rank: int) -> tuple[tuple[int, ...], bool]:
    group, model = divided(rank)
    loss = model(torch.ones(3, WIDTH)).sum()
    loss.backward()
    shapes = tuple(model.get_parameter("0.weight").grad.to_local().shape)  # type: ignore[union-attr]
    return shapes, bool(torch.isfinite(loss)) and group.lost == ""


def test_a_rank_without_peers_goes_through_forward_and_backward() -> None:
    assert in_ranks(goes_alone) == [((WIDTH, WIDTH), True)] * SIZE


def refused(rank: int, what: str) -> str:
    group, both = mesh_of(rank, SIZE, CPU, "tensor")
    mesh = both["tensor"]
    from torch.distributed.tensor import Shard, distribute_tensor

    calls: dict[str, Callable[[], Any]] = {
        "dropout": lambda: nn.functional.dropout(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])),
        "default group": lambda: dist.all_reduce(torch.ones(1)),
        "reduction": lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BXOR, group=group),
        "second": lambda: mesh_of(rank, SIZE, CPU, "tensor"),
    }
    try:
        calls[what]()
    except (ConfigError, FleetError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dropout", "random numbers for a DTensor"), ("default group", "all"), ("reduction", "within a tensor group"),
        ("second", "the script has made PyTorch's default group"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused(what: str, words: str) -> None:
    assert words in alone(partial(refused, 0, what))


def with_a_process_group(rank: int) -> list[float]:
    """Functional collectives and plain ones of a rank by itself, by PyTorch's own callers."""
    from torch.distributed import _functional_collectives as functional

    group, _ = mesh_of(rank, SIZE, CPU, "tensor")
    mine = torch.full((2,), float(rank + 1))
    gathered = functional.all_gather_tensor(mine, 0, group)
    scattered = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group)
    found = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather(found, mine, group=group)
    dist.barrier(group=group)
    return [*gathered.tolist(), *scattered.tolist(), *torch.cat(found).tolist()]


def test_pytorchs_own_callers_come_to_the_group() -> None:
    """A rank alone answers as if the others had sent the same."""
    first, second = in_ranks(with_a_process_group)
    assert first == [1.0] * 4 + [0.0, 1.0] + [1.0] * 4
    assert second == [2.0] * 4 + [2.0, 3.0] + [2.0] * 4


def stepped(rank: int, how: str) -> list[Any]:
    """Parts and moments after three steps, by a DTensor's own step or on this rank's memory."""
    group, model = divided(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        model(torch.full((3, WIDTH), 1.0 + number)).sum().backward()
        with on_local_memory(optimizer) if how == "local" else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    names = {id(one): name for name, one in model.named_parameters()}
    parts = {name: local(one).detach().numpy() for name, one in model.named_parameters()}
    moments = {names[id(one)]: local(state["exp_avg"]).numpy() for one, state in optimizer.state.items()}
    kinds = {names[id(one)]: is_whole(state["exp_avg"]) == is_whole(one) for one, state in optimizer.state.items()}
    assert all(kinds.values()) and len(kinds) == len(parts) and group.lost == ""
    return [parts, moments]


def test_a_step_on_local_memory_has_the_bits_of_a_step_of_dtensors() -> None:
    for local_step, own_step in zip(in_ranks(partial(stepped, how="local")), in_ranks(partial(stepped, how="own")), strict=True):
        for found, right in zip(local_step, own_step, strict=True):
            assert found.keys() == right.keys() and all((found[name] == right[name]).all() for name in right)
