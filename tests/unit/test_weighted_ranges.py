"""Shards by the speed of ranks: as quick as any split into whole shards, and the even split when all are alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.protocol.shards import blocks
from policies.placement import Ranges, ranges, weighted_ranges

SPEEDS = st.sampled_from((0.2, 0.25, 0.5, 0.8, 1.0, 1.0))


def slowest(split: Ranges, weights: list[float]) -> float:
    return max((end - begin) / weight for (begin, end), weight in zip(split, weights, strict=True))


def partials(split: Ranges, shards: int) -> int:
    return sum(len(blocks(begin, end, shards)) for begin, end in split)


def test_half_speed_of_one_in_four_costs_a_quarter_instead_of_double() -> None:
    split = weighted_ranges(16, (1, 1, 1, 0.5))
    assert slowest(split, [1, 1, 1, 0.5]) == 5.0 and slowest(ranges(16, 4), [1, 1, 1, 0.5]) == 8.0


@given(st.lists(SPEEDS, min_size=1, max_size=5), st.integers(0, 7))
def test_no_split_is_quicker_and_none_as_quick_has_fewer_partial_sums(weights: list[float], more: int) -> None:
    shards = len(weights) + more
    split = weighted_ranges(shards, weights)
    assert split[0][0] == 0 and split[-1][1] == shards and all(begin < end for begin, end in split)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(split))
    cuts = ((0, *inner, shards) for inner in itertools.combinations(range(1, shards), len(weights) - 1))
    every = [tuple(itertools.pairwise(cut)) for cut in cuts]
    least = min(slowest(other, weights) for other in every)
    assert slowest(split, weights) <= least * (1 + 1e-6)
    assert partials(split, shards) == min(partials(other, shards) for other in every if slowest(other, weights) <= least * (1 + 1e-6))


@given(st.integers(1, 12), st.floats(0.01, 100))
def test_equal_weights_give_the_even_split(ranks: int, weight: float) -> None:
    assert weighted_ranges(16, (weight,) * ranks) == ranges(16, ranks)


def test_a_large_world_with_slow_ranks_is_tiled() -> None:
    weights = [0.5 if rank % 97 == 0 else 1.0 for rank in range(3000)]
    split = weighted_ranges(12_000, weights)
    assert len(split) == 3000 and split[-1][1] == 12_000 and all(one[1] == other[0] for one, other in itertools.pairwise(split))
    assert slowest(split, weights) <= 5.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_that_is_no_positive_number_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weights = "):
        weighted_ranges(16, (1.0, weight))


def test_more_ranks_than_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks = 3"):
        weighted_ranges(2, (1.0, 1.0, 1.0))
