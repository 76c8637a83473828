"""The row of numbers that each rank sends beside its gradients, and how to read the rows of all ranks.

First come the offer and the time of arrival. Then come the numbers that replicas, recheck and body of :mod:`actors.rank.verify` and
:mod:`actors.rank.step.jumps` compare. Then: which of several optimizers step, flags, which parameters have a gradient. Losses and weights
of the rank's shards are last. All rows have the length for the rank with the most shards, with zeros for missing shards.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

from actors.rank.step import bits
from fleet.protocol.levels import LEVELS
from fleet.protocol.member import Offer

OFFER = 1 + len(LEVELS)
"""Numbers of an offer: a proposal, and a request of each level."""
LOGS, COLLECTS, LATE = 1, 2, 4
"""Flags of a rank: its loop has logged figures; a full collection of garbage is due; chunks that move come later than the step."""

Numbers = list[list[float]]
"""By view rank."""


class RowFormat:
    """The places of the numbers in the rows of one step.

    Args:
        checks: how many numbers each check sends.
        parameters: how many parameters there are.
        most: the largest number of shards that one rank brings.

    Attributes:
        cuts: where the numbers of each check begin and end.
        present: where the bits of the parameters with a gradient begin. ``first``: where the losses begin.
        width: numbers of a row.
    """

    def __init__(self, checks: Sequence[int], parameters: int, most: int) -> None:
        self._parameters, self.most = parameters, most
        self.cuts = list(itertools.accumulate(checks, initial=OFFER + 1))
        self.present = self.cuts[-1] + 1
        self.first = self.present + bits.width(parameters)
        self.width = self.first + 2 * most

    def pack(
        self, offer: Offer, arrived_us: int, checks: Sequence[float], flags: int, present: int, shards: Sequence[tuple[float, float]]
    ) -> list[float]:  # fmt: skip
        """This rank's row. ``flags``: see ``LOGS``. ``present``: the parameters with a gradient, as bits. ``shards``: (loss, weight) of
        each of its shards."""
        head = [*offer, arrived_us, *checks, float(flags), *bits.numbers_of(present, self._parameters)]
        missing = [0.0] * (self.most - len(shards))
        return [*head, *(loss for loss, _ in shards), *missing, *(weight for _, weight in shards), *missing]


class Rows:
    """The rows of all ranks, in order of the view. ``contributed``: the shards that each rank brings."""

    def __init__(self, form: RowFormat, numbers: Numbers, contributed: Sequence[Sequence[int]]) -> None:
        self._form, self._numbers, self._contributed = form, numbers, contributed

    @property
    def offers(self) -> list[Offer]:
        """The offers of all ranks, for ``MemberProtocol.agree``."""
        return [tuple(map(int, row[:OFFER])) for row in self._numbers]

    @property
    def arrivals_us(self) -> list[int]:
        """When each rank was done with its shards."""
        return [int(row[OFFER]) for row in self._numbers]

    @property
    def checks(self) -> list[Numbers]:
        """By check, the numbers of all ranks."""
        return [[row[lo:hi] for row in self._numbers] for lo, hi in itertools.pairwise(self._form.cuts)]

    @functools.cached_property
    def flags(self) -> int:
        """The flags that some rank has set."""
        return functools.reduce(operator.or_, (int(row[self._form.present - 1]) for row in self._numbers))

    @property
    def present(self) -> int:
        """The parameters that have a gradient in some shard, as bits."""
        return bits.any_of([row[self._form.present : self._form.first] for row in self._numbers])

    def by_shard(self, shards: int) -> tuple[list[float], list[float]]:
        """(losses, weights) of all shards."""
        rows = zip(self._numbers, self._contributed, strict=True)
        where = [(shard, row, self._form.first + i) for row, of_one in rows for i, shard in enumerate(of_one)]
        losses = {shard: row[at] for shard, row, at in where}
        weights = {shard: row[at + self._form.most] for shard, row, at in where}
        return [losses[shard] for shard in range(shards)], [weights[shard] for shard in range(shards)]
