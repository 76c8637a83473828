"""Random numbers and samples as pure functions of (seed, step, shard): the same whichever rank computes the shard, and however often."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fleet.errors import ConfigError
from fleet.rng import derive_seed

_ROUNDS = 4
_MASK = (1 << 64) - 1


def seed_shard(seed: int, step: int, shard: int) -> None:
    """Set all random generators (torch on CPU and CUDA, numpy, random) for one shard of one step."""
    _seed_all(derive_seed(seed, "shard", step, shard))


def seed_step(seed: int, step: int) -> None:
    """Set all random generators for what happens in a step outside of its shards: the same on every rank."""
    _seed_all(derive_seed(seed, "step", step))


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def sample_indices(seed: int, step: int, shard: int, shards: int, batch_size: int, dataset_len: int) -> list[int]:
    """Dataset indices of one shard of one step: ``batch_size / shards`` of them.

    Steps lay the global batches end to end; each stretch of ``dataset_len`` positions is an epoch, in an order of its own, in which every
    sample comes exactly once. A batch may reach over the end of an epoch. Nothing is kept, whatever the size of the dataset.

    Raises ConfigError when ``batch_size`` is not a positive multiple of ``shards``: shards of unequal size would weigh samples unequally.
    """
    if batch_size < 1 or batch_size % shards:
        reason = f"the global batch has to divide into {shards} batch shards of equal size"
        raise ConfigError("batch_size", batch_size, reason, f"Use a multiple of {shards}.")
    if dataset_len < 1:
        raise ConfigError("dataset", dataset_len, "it has no samples")
    size = batch_size // shards
    first = step * batch_size + shard * size
    return [_permuted(seed, position // dataset_len, position % dataset_len, dataset_len) for position in range(first, first + size)]


def sample_batch(dataset: Any, seed: int, step: int, shard: int, shards: int, batch_size: int) -> Any:
    """The collated samples of one shard of one step of a map-style ``dataset`` (``len()`` and ``[]``)."""
    indices = sample_indices(seed, step, shard, shards, batch_size, len(dataset))
    if hasattr(dataset, "__getitems__"):
        return default_collate(dataset.__getitems__(indices))
    return default_collate([dataset[index] for index in indices])


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(derive_seed(seed, "epoch", epoch, number) for number in range(_ROUNDS))


def _permuted(seed: int, epoch: int, position: int, length: int) -> int:
    """Position -> sample: a Feistel network over the next power of four, walked until it lands below ``length``.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), cycle walking; under 4 walks on average.
    """
    keys = _round_keys(seed, epoch)
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        position = left << half | right
        if position < length:
            return position


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
