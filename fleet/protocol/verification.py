"""Which rank computes which shard again, and when, and how long a wrong rank stays unseen. Pure: all ranks derive the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleet.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How often ranks compute shards again, from the budget for it.

    In a verified step every rank computes one shard of another rank again, all at the same time. So each rank computes one shard more,
    where the fullest rank has shards / ranks of them. ``chunks`` is the cost of adding up a slice of the sum again, as a share of a step's
    compute.
    """

    budget: float = 0.01
    chunks: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise ConfigError("verify.budget", self.budget, "is a share of compute, from 0 (off) to 1")
        if not self.chunks >= 0:
            raise ConfigError("verify.chunks", self.chunks, "must not be below 0")

    def cost(self, shards: int, ranks: int) -> float:
        """Compute of one verification as a share of a step's: one shard over those of the fullest rank, plus ``chunks``."""
        if not 1 <= ranks <= shards:
            raise ConfigError("ranks", ranks, f"each rank needs at least one of the {shards} batch shards")
        return 1 / math.ceil(shards / ranks) + self.chunks

    def every(self, shards: int, ranks: int) -> int:
        """Steps from one verification to the next: the fewest that the budget allows. 0: no verification."""
        return math.ceil(self.cost(shards, ranks) / self.budget - 1e-9) if self.budget > 0 else 0

    @staticmethod
    def shard(verification: int, begin: int, end: int) -> int:
        """The shard of ``begin..end`` that the verification of this number samples: each in turn. Raises ValueError when there is none."""
        if not begin < end:
            raise ValueError(f"no shard lies in {begin}..{end}")
        return begin + verification % (end - begin)


NONE = -1
"""In the place of a shard: there is none."""


class Samples(NamedTuple):
    """By view rank: its ``own`` shard that another rank computes again, the ``checked`` shard that it computes again, and its owner.

    ``number``: the number of earlier verifications.
    """

    own: tuple[int, ...]
    checked: tuple[int, ...]
    owners: tuple[int, ...]
    number: int


def samples(sampling: Sampling, step: int, ranges: Sequence[tuple[int, int]], shards: int) -> Samples | None:
    """The samples of ``step``: one shard of each rank, and another rank, which changes, to compute it again. None: no verification.

    Of ``every`` steps the last one is verified, so that a run does not begin with a verification. A rank without shards has :data:`NONE`.
    """
    ranks = len(ranges)
    every = sampling.every(shards, sum(begin < end for begin, end in ranges)) if ranks > 1 else 0
    if every == 0 or step % every != every - 1:
        return None
    number = step // every
    own = tuple(sampling.shard(number, begin, end) if begin < end else NONE for begin, end in ranges)
    distance = 1 + number % (ranks - 1)
    owners = tuple((rank + distance) % ranks for rank in range(ranks))
    return Samples(own, tuple(own[owner] for owner in owners), owners, number)


def expected_steps_to_detection(every: int, hit: float) -> float:
    """Mean number of steps from the first corrupt step until a verification finds it, both counted: (k + 1) / 2 + k (1 - p) / p.

    Derivation: k = ``every``. The first corrupt step is equally likely anywhere between two verifications, so the next one is the 1st to
    k-th step from it: (k + 1) / 2 in the mean. Each verification finds the corruption with probability p = ``hit``, independently. So the
    number of verifications before the one that finds it is geometric with mean (1 - p) / p. Each of them costs k steps. Infinite for p = 0
    or k = 0.
    """
    if not 0 <= hit <= 1:
        raise ValueError(f"{hit} is no probability")
    return math.inf if hit == 0 or every == 0 else (every + 1) / 2 + every * (1 - hit) / hit
