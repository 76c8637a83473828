"""Random numbers and samples as pure functions of (seed, step, shard): the same whichever rank computes the shard, and however often."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fleet.errors import ConfigError
from fleet.rng import derive_seed

_ROUNDS = 4
_MASK = (1 << 64) - 1

MANY = 32
"""From so many samples on, numpy computes the order of all together faster than Python one by one."""


def seed_shard(seed: int, step: int, shard: int) -> None:
    """Set all random generators (torch on CPU and CUDA, numpy, random) for one shard of one step."""
    _seed_all(derive_seed(seed, "shard", step, shard))


def seed_step(seed: int, step: int) -> None:
    """Set all random generators for what happens in a step outside of its shards: the same on every rank."""
    _seed_all(derive_seed(seed, "step", step))


def seed_data(seed: int, step: int, shard: int) -> None:
    """Set all random generators for the fetch of one shard's samples, so that random augmentation follows from (seed, step, shard), too."""
    _seed_all(derive_seed(seed, "data", step, shard))


def _seed_all(seed: int) -> None:
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the former notes the whole stack for each accelerator that might yet be set up: a tenth of a short step, ten times a step
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def shard_size(batch_size: int, shards: int, dataset_len: int) -> int:
    """Samples of one shard.

    Raises ConfigError when ``batch_size`` is not a positive multiple of ``shards``: shards of unequal size would weigh samples unequally.
    """
    if batch_size < 1 or batch_size % shards:
        reason = f"the global batch has to divide into {shards} batch shards of equal size"
        raise ConfigError("batch_size", batch_size, reason, f"Use a multiple of {shards}.")
    if dataset_len < 1:
        raise ConfigError("dataset", dataset_len, "it has no samples")
    return batch_size // shards


def sample_indices(seed: int, step: int, shard: int, shards: int, batch_size: int, dataset_len: int) -> list[int]:
    """Dataset indices of one shard of one step: ``batch_size / shards`` of them.

    Steps lay the global batches end to end; each stretch of ``dataset_len`` positions is an epoch, in an order of its own, in which every
    sample comes exactly once. A batch may reach over the end of an epoch. Nothing is kept, whatever the size of the dataset.

    Raises ConfigError as :func:`shard_size` does.
    """
    size = shard_size(batch_size, shards, dataset_len)
    first = step * batch_size + shard * size
    if size >= MANY:
        return _many(seed, first, first + size, dataset_len)
    return [_permuted(seed, position // dataset_len, position % dataset_len, dataset_len) for position in range(first, first + size)]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where in the data a run is: ``samples_seen`` in all, which make ``epoch`` whole epochs and ``seen_in_epoch`` samples of the next."""

    samples_seen: int
    epoch: int
    seen_in_epoch: int


def progress(step: int, batch_size: int, dataset_len: int) -> Progress:
    """What ``step`` committed steps have taken from a dataset."""
    return Progress(step * batch_size, *divmod(step * batch_size, dataset_len))


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


def _many(seed: int, first: int, stop: int, length: int) -> list[int]:
    """:func:`_permuted` of a stretch of positions, which may reach over the ends of epochs."""
    found: list[int] = []
    while first < stop:
        epoch, start = divmod(first, length)
        count = min(stop - first, length - start)
        found += _permuted_many(seed, epoch, np.arange(start, start + count, dtype=np.uint64), length).tolist()
        first += count
    return found


def _permuted_many(seed: int, epoch: int, positions: np.ndarray, length: int) -> np.ndarray:
    keys = [np.uint64(key) for key in _round_keys(seed, epoch)]
    bits = max(1, ((length - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    outside = np.arange(len(positions))
    while len(outside):
        walking = positions[outside]
        left, right = walking >> half, walking & mask
        for key in keys:
            left, right = right, left ^ (_mix_many(right ^ key) & mask)
        positions[outside] = left << half | right
        outside = outside[positions[outside] >= length]
    return positions


def _mix_many(values: np.ndarray) -> np.ndarray:
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
