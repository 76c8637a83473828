"""Samples and random numbers follow from (seed, step, shard) alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from actors.rank.data.sampling import sample_indices, samples_of, seed_shard, seed_step
from fleet.errors import ConfigError


def positions(seed: int, steps: int, shards: int, batch_size: int, length: int) -> list[int]:
    """Samples in order of global position, over whole steps."""
    return [i for step in range(steps) for shard in range(shards) for i in sample_indices(seed, step, shard, shards, batch_size, length)]


@settings(max_examples=60)
@given(st.integers(0, 9), st.integers(1, 700), st.integers(1, 8), st.integers(1, 4))
def test_every_epoch_has_every_sample_once(seed: int, length: int, shards: int, per_shard: int) -> None:
    batch_size = shards * per_shard
    steps = -(-2 * length // batch_size)
    order = positions(seed, steps, shards, batch_size, length)
    for epoch in range(2):
        assert sorted(order[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = positions(1, 20, 2, 10, 100)
    assert order[:100] != order[100:] and order[:100] != list(range(100))
    assert positions(2, 10, 2, 10, 100) != order[:100]


def test_the_order_is_no_near_copy_of_the_dataset() -> None:
    """Correlation of position and sample stays within five standard errors of none."""
    order = np.array(positions(3, 100, 1, 100, 10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 5 / np.sqrt(10_000)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size = 30"):
        sample_indices(0, 0, 0, 16, 30, 100)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        sample_indices(0, 0, 0, 1, 1, 0)


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_generators_are_set_by_step_and_shard() -> None:
    seed_shard(5, 3, 1)
    first = draw()
    for other in [(5, 3, 2), (5, 4, 1), (6, 3, 1)]:
        seed_shard(*other)
        assert all(a != b for a, b in zip(draw(), first, strict=True))
    seed_step(5, 3)
    assert draw() != first
    seed_shard(5, 3, 1)
    assert draw() == first


def test_batches_are_collated() -> None:
    dataset = [(torch.tensor(float(i)), i) for i in range(32)]
    values, labels = default_collate(samples_of(dataset, 0, 0, 1, 4, 16))
    assert values.tolist() == [float(i) for i in labels] == [float(i) for i in sample_indices(0, 0, 1, 4, 16, 32)]
