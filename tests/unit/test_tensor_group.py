"""Collectives of ranks that compute together: the sums of PyTorch's, in the order of the ranks, and answers of a rank by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.membership.subgroup import Subgroup
from actors.rank.mesh import collectives
from actors.rank.mesh.torch_group import NoGroup, TensorGroup
from fleet.errors import FleetError
from tests.unit.test_reduction import with_groups

SIZES = (2, 3, 4)


def value_of(rank: int, length: int = 5) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def in_order(size: int, length: int = 5) -> torch.Tensor:
    total = value_of(0, length).clone()
    for rank in range(1, size):
        total += value_of(rank, length)
    return total


def on_ranks(size: int, work: Callable[[TensorGroup, int], Any]) -> list[Any]:
    def rank(group: Group) -> Any:
        own = TensorGroup(group.rank, size)
        own.meet(group)
        found = work(own, group.rank)
        assert own.lost == ""
        return found

    return with_groups(size, rank)


class Options:
    """As PyTorch gives them."""

    def __init__(self, op: Any = dist.ReduceOp.SUM, root: int = 0) -> None:
        self.reduceOp, self.rootRank = op, root


@pytest.mark.parametrize("length", [5, 70_001])
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_added_in_the_order_of_the_ranks(size: int, length: int) -> None:
    """Also where each rank adds up a part of a large tensor, whose length no number of ranks divides."""

    def work(group: TensorGroup, rank: int) -> torch.Tensor:
        tensor = value_of(rank, length)
        group.allreduce([tensor], Options()).wait()
        return tensor

    assert all(torch.equal(found, in_order(size, length)) for found in on_ranks(size, work))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.AVG, lambda stack: stack.mean(0)), (dist.ReduceOp.MAX, lambda stack: stack.amax(0)),
        (dist.ReduceOp.MIN, lambda stack: stack.amin(0)), (dist.ReduceOp.PRODUCT, lambda stack: stack.prod(0)),
    ],
)  # fmt: skip
def test_the_other_reductions(op: Any, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def work(group: TensorGroup, rank: int) -> torch.Tensor:
        tensor = value_of(rank)
        group.allreduce([tensor], Options(op))
        return tensor

    right = expected(torch.stack([value_of(rank) for rank in range(3)]))
    assert all(torch.allclose(found, right) for found in on_ranks(3, work))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_gathered_scattered_sent_to_all_and_broadcast(size: int) -> None:
    def work(group: TensorGroup, rank: int) -> dict[str, torch.Tensor]:
        gathered, scattered, exchanged = torch.empty(size * 2), torch.empty(2), torch.empty(size)
        group._allgather_base(gathered, torch.full((2,), float(rank)))
        group._reduce_scatter_base(scattered, torch.arange(float(2 * size)) + rank, Options())
        group.all_to_all_single(exchanged, torch.full((size,), float(rank)), [], [])
        sent = torch.full((3,), float(rank))
        group.broadcast([sent], Options(root=1))
        group.barrier()
        return {"gathered": gathered, "scattered": scattered, "exchanged": exchanged, "sent": sent}

    ranks = torch.arange(float(size))
    for rank, found in enumerate(on_ranks(size, work)):
        assert torch.equal(found["gathered"], ranks.repeat_interleave(2))
        assert torch.equal(found["scattered"], torch.arange(2.0 * rank, 2.0 * rank + 2) * size + ranks.sum())
        assert torch.equal(found["exchanged"], ranks)
        assert torch.equal(found["sent"], torch.ones(3))


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_into_the_memory_of_an_own_part_is_right(size: int) -> None:
    def work(group: TensorGroup, rank: int) -> torch.Tensor:
        parts = [torch.full((2,), float(10 * rank + other)) for other in range(size)]
        group.reduce_scatter([parts[rank]], [parts], Options())
        return parts[rank]

    for rank, found in enumerate(on_ranks(size, work)):
        assert found.tolist() == [float(10 * sum(range(size)) + size * rank)] * 2


def test_parts_of_different_lengths_are_sent_to_all() -> None:
    """As the tokens of experts: rank r sends r + 1 elements to rank 0, and none to rank 1."""

    def work(group: TensorGroup, rank: int) -> torch.Tensor:
        output = torch.empty(3 if rank == 0 else 0)
        group.all_to_all_single(output, torch.full((rank + 1,), float(rank)), [1, 2] if rank == 0 else [0, 0], [rank + 1, 0])
        return output

    assert [found.tolist() for found in on_ranks(2, work)] == [[0.0, 1.0, 1.0], []]


def test_a_rank_by_itself_answers_as_if_all_had_sent_the_same() -> None:
    group = TensorGroup(1, 3)
    total, gathered, scattered = torch.ones(2), torch.empty(6), torch.empty(2)
    group.allreduce([total], Options())
    group._allgather_base(gathered, torch.tensor([1.0, 2.0]))
    group._reduce_scatter_base(scattered, torch.arange(6.0), Options())
    assert (total.tolist(), gathered.tolist(), scattered.tolist()) == ([1, 1], [1, 2, 1, 2, 1, 2], [2, 3])
    assert group.lost == ""


def test_a_broken_group_is_told_once_and_the_shard_goes_on() -> None:
    """Until the rank meets others again: nothing that it computes until then counts."""

    def work(inside: Group) -> str:
        group, total = TensorGroup(inside.rank, 2), torch.ones(2)
        group.meet(inside)
        inside.interrupt("a peer is gone")
        group.allreduce([total], Options())
        group.allreduce([total], Options())
        lost = group.lost
        group.meet(None)
        assert group.lost == ""
        return lost

    assert all("a peer is gone" in lost for lost in with_groups(2, work))  # type: ignore[operator]


def test_a_reduction_without_an_order_is_refused() -> None:
    with pytest.raises(FleetError, match="within a tensor group"):
        TensorGroup(0, 2).allreduce([torch.ones(1)], Options(dist.ReduceOp.BXOR))


@pytest.mark.parametrize("name", ["allreduce", "barrier", "broadcast", "send", "allgather"])
def test_the_default_group_refuses_and_names_the_way_out(name: str) -> None:
    with pytest.raises(FleetError, match=r"run\.mesh"):
        getattr(NoGroup(0, 2), name)([torch.ones(1)])


def test_some_ranks_of_a_view_are_a_group_of_their_own() -> None:
    """Two at a time, which are numbered from 0, beside each other in one view; what breaks the view's group breaks both."""

    gathered = threading.Barrier(4)

    def work(whole: Group) -> tuple[int, list[float], str]:
        members = (0, 2) if whole.rank % 2 == 0 else (1, 3)
        part = Subgroup(whole, members)
        found = [torch.empty(1) for _ in members]
        collectives.all_gather(part, torch.tensor([float(whole.rank)]), found)
        gathered.wait(30.0)
        try:
            whole.interrupt("over")
            collectives.all_gather(part, torch.tensor([0.0]), [torch.empty(1) for _ in members])
        except GroupBroken as error:
            return part.rank, [float(one) for one in found], str(error)
        return part.rank, [], ""

    found = with_groups(4, work)
    assert [(rank, values) for rank, values, _ in found] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]  # type: ignore[misc]
    assert all(reason for *_, reason in found)  # type: ignore[misc]
