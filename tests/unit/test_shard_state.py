"""State that shards carry to the next step: what ranks bring to each other, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.rank.membership.process_group import Group
from actors.rank.step.shard_state import ShardState, ShardStates
from fleet.errors import ConfigError, LoopError
from tests.unit.test_reduction import with_groups


def counter(shards: int) -> ShardState:
    one = ShardState(lambda shard: {"sum": torch.full((2,), float(shard)), "steps": torch.tensor(0)})
    one.begin(shards)
    return one


def compute(one: ShardState, shard: int) -> None:
    one.enter(shard)
    found = one.value
    one.value = {"steps": found["steps"] + 1, "sum": found["sum"] + 10}


def test_what_a_body_leaves_counts_once_the_step_is_taken() -> None:
    one = counter(2)
    compute(one, 0)
    compute(one, 0)  # once more, as after a loss
    one.enter(0)
    assert one.value["steps"] == 0
    compute(one, 0)
    one.forget()
    compute(one, 1)
    one.take()
    assert {key: each.tolist() for key, each in one.state_dict().items()} == {"0": [0, 1], "1": [[0.0, 0.0], [11.0, 11.0]]}


def test_a_copy_is_given_and_taken() -> None:
    one = counter(1)
    one.enter(0)
    value = one.value
    value["sum"] += 5
    one.value = value
    value["sum"] += 5
    one.take()
    assert one.state_dict()["1"].tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize("contributed", [[(0, 1), (2, 3), (4,)], [(0, 3, 4), (1, 2), ()]])
def test_all_ranks_hold_that_of_all_shards(contributed: list[tuple[int, ...]]) -> None:
    def rank(group: Group) -> list[Any]:
        one, other = counter(5), ShardState(lambda shard: torch.zeros(1))
        other.begin(5)
        states = ShardStates({"model": None, "one": one, "other": other})
        for _ in range(3):
            for shard in contributed[group.rank]:
                states.enter(shard)
                compute(one, shard)
                other.value = other.value + shard
            states.send(group, contributed)
            states.receive(group, contributed)
            states.take()
        return [one.state_dict()["1"][:, 0].tolist(), one.state_dict()["0"].tolist(), other.state_dict()["0"][:, 0].tolist()]

    right = [[30.0, 31.0, 32.0, 33.0, 34.0], [3] * 5, [0.0, 3.0, 6.0, 9.0, 12.0]]
    assert with_groups(3, rank) == [right] * 3


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (torch.zeros(2), "no function"),
        (lambda shard: 1.0, "no tensor"),
        (lambda shard: [], "no tensor"),
        (torch.zeros, "other shapes"),
    ],
)
def test_a_beginning_that_cannot_be_kept_is_refused(first: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ShardState(first).begin(3)


@pytest.mark.parametrize(
    "value", [{"sum": torch.zeros(3), "steps": torch.tensor(0)}, torch.zeros(2), {"sum": 1.0, "steps": torch.tensor(0)}]
)
def test_another_shape_than_at_first_is_refused_by_name(value: Any) -> None:
    one = counter(2)
    one.enter(1)
    with pytest.raises(LoopError, match="shard 1: .*its shapes stay"):
        one.value = value


def test_it_belongs_into_the_loop_and_is_tracked() -> None:
    with pytest.raises(LoopError, match="step.batches"):
        _ = counter(2).value
    with pytest.raises(LoopError, match="run.track"):
        ShardState(lambda shard: torch.zeros(1)).value = torch.zeros(1)


def test_that_of_another_number_of_shards_is_not_loaded() -> None:
    with pytest.raises(ConfigError, match="same number of shards"):
        counter(4).load_state_dict(counter(2).state_dict())
