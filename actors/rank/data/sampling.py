"""Random numbers and samples as pure functions of (seed, step, shard): the same on each rank, each time a shard is computed."""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.simulation.rng import derive_seed

_ROUNDS = 4
_MASK = (1 << 64) - 1

MANY = 32
"""From so many samples on, numpy computes the order of all together faster than Python one by one."""


def seed_shard(seed: int, step: int, shard: int) -> None:
    """Set all random generators (torch on CPU and CUDA, numpy, random) for one shard of one step."""
    seed_all(derive_seed(seed, "shard", step, shard))


def seed_layer(seed: int, step: int, shard: int, layer: int) -> None:
    """Set all random generators for one layer's forward of one shard: the same wherever the layer is computed."""
    seed_all(derive_seed(seed, "layer", step, shard, layer))


def seed_step(seed: int, step: int) -> None:
    """Set all random generators for the part of a step outside of its shards: the same on each rank."""
    seed_all(derive_seed(seed, "step", step))


def seed_data(seed: int, step: int, shard: int) -> None:
    """Set all random generators for the fetch of one shard's samples. So random augmentation depends on (seed, step, shard) alone, too."""
    seed_all(derive_seed(seed, "data", step, shard))


@contextmanager
def seeded_alone(seed: int, step: int) -> Iterator[None]:
    """Context with generators set for work that any one rank does for all at ``step``. Afterwards they are as they were before."""
    with generators_kept():
        seed_all(derive_seed(seed, "alone", step))
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the generators of torch, Python and numpy are as they were before."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def seed_all(seed: int) -> None:
    """Set the generators of torch, Python and numpy."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # manual_seed notes the stack for each accelerator that may be set up later: a tenth of a short step, ten times a step
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def shard_size(batch_size: int, shards: int, dataset_len: int) -> int:
    """Samples of one shard.

    Raises ConfigError when ``batch_size`` is not a positive multiple of ``shards``: shards of unequal size would weigh samples unequally.
    """
    if not isinstance(batch_size, int):
        raise ConfigError("batch_size", batch_size, "it is the number of samples of a step, of all ranks together", "Give an int.")
    if batch_size < 1 or batch_size % shards:
        reason = f"the global batch has to divide into {shards} batch shards of equal size"
        near = shards * max(1, round(batch_size / shards))
        cut = max((one for one in range(1, min(batch_size, shards) + 1) if batch_size % one == 0), default=0)
        other = f", or --shards {cut}" if cut else ""
        raise ConfigError("batch_size", batch_size, reason, f"Use a multiple of {shards}, such as {near}{other}.")
    if dataset_len < 1:
        raise ConfigError("dataset", dataset_len, "it has no samples")
    return batch_size // shards


def sample_indices(seed: int, step: int, shard: int, shards: int, batch_size: int, dataset_len: int) -> list[int]:
    """Dataset indices of one shard of one step: ``batch_size / shards`` of them.

    The global batches of all steps lie end to end. Each stretch of ``dataset_len`` positions is an epoch with an order of its own, in which
    each sample comes exactly once. A batch may reach over the end of an epoch. The memory needed does not grow with the dataset.

    Raises ConfigError as :func:`shard_size` does.
    """
    size = shard_size(batch_size, shards, dataset_len)
    first = step * batch_size + shard * size
    if size >= MANY:
        return _many(seed, first, size, dataset_len)
    return [_permuted(seed, position // dataset_len, position % dataset_len, dataset_len) for position in range(first, first + size)]


def samples_of(dataset: Any, seed: int, step: int, shard: int, shards: int, batch_size: int) -> list[Any]:
    """The samples of one shard of one step, of a map-style ``dataset`` or of an :class:`Ordered` one."""
    if isinstance(dataset, Ordered):
        return dataset.samples_of(seed, step, shard, shards, batch_size)
    return read_many(dataset, sample_indices(seed, step, shard, shards, batch_size, len(dataset)))


def read_many(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """These samples of a map-style dataset, in one call where it has ``__getitems__``."""
    many = getattr(dataset, "__getitems__", None)
    return list(many(indices)) if many is not None else [dataset[index] for index in indices]


@dataclass(frozen=True, slots=True)
class Shared:
    """``dataset``, of which each ``steps`` successive steps take the same samples. Give the same object each time: it identifies a feed."""

    dataset: Any
    steps: int


class Ordered(ABC):
    """A dataset that chooses the samples of a shard itself, and keeps to the batch size that its run began with."""

    batch_size: int | None = None
    workers: int = 0

    @property
    @abstractmethod
    def order(self) -> str:
        """The name of the order, see ``DataRead``."""

    @abstractmethod
    def samples_of(self, seed: int, step: int, shard: int, shards: int, batch_size: int) -> list[Any]:
        """The samples of one shard: the same at each call, on each rank."""

    @abstractmethod
    def data_sha256(self) -> str:
        """Digest that identifies the dataset; empty when it cannot be computed."""

    def far(self, step: int, shard: int, shards: int, batch_size: int) -> bool:
        """Whether these samples take long, as many others have to be read and dropped first."""
        return False

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many samples there are; 0: unknown."""

    def begin(self, batch_size: int, shards: int) -> None:
        """The run trains with this batch size. Raises ConfigError when it began with another: samples would be skipped or repeated."""
        self._keep(self.batch_size or batch_size, batch_size)

    def _keep(self, begun: int, wanted: int) -> None:
        if begun != wanted:
            reason = f"the run began with {begun}, and its next step would skip or repeat samples"
            raise ConfigError("batch_size", wanted, reason, "Keep it, or begin a new run.")
        self.batch_size = begun

    def _resume(self, state: Mapping[str, Any]) -> None:
        if state["batch_size"] is not None:
            self._keep(state["batch_size"], self.batch_size or state["batch_size"])


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


def stretches(first: int, count: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(epoch, start, stop) of each epoch that ``count`` positions from ``first`` on reach into."""
    stop = first + count
    while first < stop:
        epoch, start = divmod(first, length)
        end = min(length, start + stop - first)
        yield epoch, start, end
        first += end - start


def _many(seed: int, first: int, count: int, length: int) -> list[int]:
    """:func:`_permuted` of a stretch of positions, which may reach over the ends of epochs."""
    found: list[int] = []
    for epoch, start, stop in stretches(first, count, length):
        found += permuted_many(seed, epoch, np.arange(start, stop, dtype=np.uint64), length).tolist()
    return found


def permuted_many(seed: int, epoch: int, positions: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """:func:`_permuted` of many uint64 positions of one epoch at once; they are overwritten."""
    return _walked(positions, _round_keys(seed, epoch), length, back=False)


def positions_many(seed: int, epoch: int, samples: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Inverse of :func:`permuted_many`: at which positions of the epoch these samples come; they are overwritten."""
    return _walked(samples, _round_keys(seed, epoch)[::-1], length, back=True)


def _walked(values: NDArray[np.uint64], keys: Sequence[int], length: int, *, back: bool) -> NDArray[np.uint64]:
    """Apply the rounds of ``keys`` in turn. With ``back``, the halves change places before and after, which inverts a Feistel network."""
    mixed = [np.uint64(key) for key in keys]
    bits = max(1, ((length - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    outside = np.arange(len(values))
    while len(outside):
        walking = values[outside]
        left, right = (walking & mask, walking >> half) if back else (walking >> half, walking & mask)
        for key in mixed:
            left, right = right, left ^ (_mix_many(right ^ key) & mask)
        values[outside] = right << half | left if back else left << half | right
        outside = outside[values[outside] >= length]
    return values


def _mix_many(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
