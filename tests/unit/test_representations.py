"""``step.gather``: what ranks bring to each other, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from actors.rank.membership.process_group import Group
from actors.rank.step.representations import CALLS, Representations
from fleet.errors import LoopError
from tests.unit.test_reduction import with_groups

Contributed = Sequence[Collection[int]]
SHARDS = 6


def value(shard: int) -> torch.Tensor:
    return torch.full((2, 3), float(shard), dtype=torch.float64)


def look(one: Representations, shard: int, *tensors: torch.Tensor) -> None:
    one.begin(shard, looking=True)
    for tensor in tensors or (value(shard),):
        one.gather(tensor)
    assert one.end()


@pytest.mark.parametrize(
    ("contributed", "masks", "silent"),
    [
        ([(0, 1), (2, 3), (4, 5)], (), ()),
        ([(0, 3), (1, 4), (2, 5)], (), ()),
        ([(0, 1, 4), (2, 3, 5)], [(0, 1), (2, 3)], ()),
        ([(0, 1, 4), (2, 3, 5)], [(0, 1, 2, 3, 4, 5), (2, 3)], ()),
        ([(0, 1, 2), (3, 4, 5), ()], [range(6), range(6), ()], (2,)),
        ([(0, 1, 2), (3, 4), (5,)], [range(6), range(6), ()], ()),
        ([(0, 1, 2, 3), (4, 5)], [(), (5, 0)], ()),
    ],
)
def test_all_ranks_have_all_but_those_that_are_silent(contributed: Contributed, masks: Contributed, silent: Collection[int]) -> None:
    """``masks``: what ranks held when the view began in the middle of a step; lost shards are looked at by the rank that gets them."""

    def rank(group: Group) -> bool:
        one = Representations(SHARDS)
        one.used = True
        for shard in masks[group.rank] if masks else ():
            look(one, shard)
        one.join(masks, silent)
        for shard in one.lacking(sorted(contributed[group.rank])):
            look(one, shard)
        one.finish(group, contributed)
        one.finish(group, contributed)
        if group.rank in silent:
            return not one.complete
        one.begin(0, looking=False)
        return torch.equal(one.gather(value(0)), torch.cat([value(shard) for shard in range(SHARDS)]))

    assert with_groups(len(contributed), rank) == [True] * len(contributed)


def test_a_step_follows_on_a_step_in_the_same_view() -> None:
    def rank(group: Group) -> list[float]:
        one, sums = Representations(2), []
        one.used = True
        for step in range(3):
            look(one, group.rank, value(10 * step + group.rank))
            one.exchange(group, [(0,), (1,)])
            one.begin(group.rank, looking=False)
            sums.append(float(one.gather(value(10 * step + group.rank)).sum()))
            one.end()
            one.finish(group, [(0,), (1,)])
            one.begin_step()
        return sums

    assert with_groups(2, rank) == [[6.0, 126.0, 246.0]] * 2


def test_the_gradient_of_the_mean_over_shards_is_that_of_the_whole_batch() -> None:
    weight = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).requires_grad_()
    data = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (whole,) = torch.autograd.grad((data.flatten(0, 1) @ weight).softmax(0).square().sum(), weight)
    one, parts = Representations(4), []
    for shard in range(4):
        look(one, shard, data[shard] @ weight)
    for shard in range(4):
        one.begin(shard, looking=False)
        everyone = one.gather(data[shard] @ weight)
        assert not one.end()
        parts += torch.autograd.grad(everyone.softmax(0).square().sum(), weight)
    assert torch.allclose(torch.stack(parts).mean(0), whole, rtol=1e-12, atol=0)


def test_one_shard_is_the_whole_batch() -> None:
    one, tensor = Representations(1), value(3)
    one.begin(0, looking=False)
    assert one.gather(tensor) is tensor
    assert not one.end()
    assert one.complete and not one.used


def test_a_rank_that_is_tried_alone_has_a_loss_of_the_whole_batch() -> None:
    one = Representations(1)
    one.times = 4
    look(one, 0)
    assert one.complete
    one.begin(0, looking=False)
    assert one.gather(value(0)).shape == (8, 3)


def test_shards_of_other_shapes_are_refused_by_name() -> None:
    def rank(group: Group) -> str:
        one = Representations(2)
        one.used = True
        look(one, group.rank, torch.zeros(2 + group.rank, 3))
        with pytest.raises(LoopError) as refused:
            one.exchange(group, [(0,), (1,)])
        return str(refused.value)

    said = with_groups(2, rank)
    assert all("step.gather, shard" in one and "(3, 3)" in one and "(2, 3)" in one for one in map(str, said)), said


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.tensor(1.0)], "0 dimensions"),
        ([torch.zeros(2, dtype=torch.complex64)], "complex64"),
        ([torch.zeros(2)] * (CALLS + 1), "concatenate"),
    ],
)
def test_what_cannot_be_gathered_is_refused(tensors: list[torch.Tensor], said: str) -> None:
    with pytest.raises(LoopError, match=said):
        look(Representations(2), 0, *tensors)


@pytest.mark.parametrize("calls", [0, 2])
def test_another_number_of_calls_than_in_the_first_pass_is_refused(calls: int) -> None:
    one = Representations(2)
    look(one, 0)
    look(one, 1)
    one.begin(0, looking=False)

    def body() -> None:
        for _ in range(calls):
            one.gather(value(0))
        one.end()

    with pytest.raises(LoopError, match="first pass"):
        body()


@pytest.mark.parametrize("second", [torch.zeros(2, 3), torch.ones(3, 3), torch.ones(2, 3).double(), torch.ones(2, 3) + 1e-3])
def test_a_tensor_that_is_not_that_of_the_first_pass_is_refused(second: torch.Tensor) -> None:
    """It was made from what an earlier call has given, which the first pass does not have, or is kept between the passes."""
    one = Representations(2)
    one.used = True
    for shard in range(2):
        look(one, shard, value(shard), torch.ones(2, 3))
    one.begin(0, looking=False)
    one.gather(value(0))
    with pytest.raises(LoopError, match="shard 0: the tensor of call 2: it is not that of the first pass"):
        one.gather(second)


def test_a_forward_with_gradients_may_round_otherwise() -> None:
    one = Representations(2)
    one.used = True
    for shard in range(2):
        look(one, shard, torch.ones(2, 3))
    one.begin(0, looking=False)
    assert one.gather(torch.ones(2, 3) + 1e-6).shape == (4, 3)


def test_what_the_body_changes_in_place_behind_a_call_is_gathered_as_it_was() -> None:
    one = Representations(2)
    one.used = True
    for shard in range(2):
        one.begin(shard, looking=True)
        kept = value(shard)
        one.gather(kept)
        kept.zero_()
        assert one.end()
    one.begin(0, looking=False)
    assert torch.equal(one.gather(value(0)), torch.cat([value(0), value(1)]))
