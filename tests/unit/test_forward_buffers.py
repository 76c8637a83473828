"""Buffers that a forward changes: what one shard, and a shard without weight, leave in them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from actors.rank.membership.process_group import Group
from actors.rank.step.gradients import GradientBuffers
from actors.rank.step.reduction import Reducer
from tests.unit.test_reduction import sum_up


class Remembers(nn.Linear):
    """A buffer goes from far to near, so that its way and its end do not have the same last bit."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("seen", torch.full((6,), 1e4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.9)
        return super().forward(x)


def test_with_one_shard_a_buffer_is_what_the_forward_has_left() -> None:
    torch.manual_seed(0)
    model, reducer = Remembers(), Reducer(1)
    plain = Remembers()
    buffers = GradientBuffers({"model": model}, 1)
    reducer.bind(Group(1, 0, 1, torch.device("cpu")), [[(0, 1)]])
    for _ in range(5):
        x = torch.randn(4, 6)
        buffers.begin_step()
        buffers.begin_shard()
        model(x).sum().backward()
        buffers.end_shard(0)
        sum_up(buffers, reducer)
        buffers.commit()
        plain(x)
        assert torch.equal(model.seen, plain.seen)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_a_shard_without_weight_has_left_in_a_buffer_counts_nothing(shards: int) -> None:
    model, reducer = Remembers(), Reducer(shards)
    buffers = GradientBuffers({"model": model}, shards)
    reducer.bind(Group(1, 0, 1, torch.device("cpu")), [[(0, shards)]])
    buffers.begin_step()
    for shard in range(shards):
        buffers.begin_shard()
        model(torch.full((4, 6), math.nan))
        buffers.end_shard(shard, 1.0, 0.0)
    sum_up(buffers, reducer)
    buffers.commit()
    assert torch.equal(model.seen, torch.full((6,), 1e4))
