"""When gradients travel beside a backward: all ranks of a view find alike, and buckets are cut accordingly."""

from __future__ import annotations

import math

import pytest
import torch

from actors.rank.membership.process_group import Group
from actors.rank.step.reduction import Reducer
from fleet.protocol.beside import RankRoom, travels_beside
from tests.unit.test_process_group import HOST
from tests.unit.test_reduction import with_groups

FLOATS = 1 << 20


@pytest.mark.parametrize(
    ("rooms", "cores_a_rank", "expected"),
    [
        ([RankRoom("a", 2)] * 4, 2.0, False),
        ([RankRoom("a", 8)] * 4, 2.0, True),
        ([RankRoom("a", 7.5)] * 4, 2.0, False),
        ([RankRoom("a", 2)] * 4, 0.0, True),
        ([RankRoom("a", 1), RankRoom("b", 1)], 2.0, True),
        ([RankRoom("a", 4), RankRoom("a", 1)], 2.0, True),
    ],
    ids=["short", "enough", "nearly", "always", "a wire", "the most that one says"],
)
def test_gradients_travel_beside_a_backward_where_that_hides_something(rooms: list[RankRoom], cores_a_rank: float, expected: bool) -> None:
    assert travels_beside(rooms, cores_a_rank) is expected


@pytest.mark.parametrize(("cores", "limit", "buckets"), [(2, 2.0, 1), (8, 2.0, 4), (2, 0.0, 4), (64, math.inf, 1)])
def test_each_rank_of_a_view_cuts_alike(cores: float, limit: float, buckets: int) -> None:
    def found(group: Group) -> tuple[bool, int]:
        assert group.rooms == (RankRoom(HOST, cores),) * 3
        reducer = Reducer(3, overlap_cores=limit)
        reducer.bind(group, [[(rank, rank + 1)] for rank in range(3)])
        return reducer.beside, len(reducer.stretches([torch.empty(FLOATS)]))

    assert with_groups(3, found, cores=cores) == [(buckets == 4, buckets)] * 3
