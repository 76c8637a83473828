"""In some steps each rank also computes a shard of another rank before the commit, and all compare the gradients bit for bit. It also adds
up a slice of that rank's sum again (:mod:`actors.rank.verify.sumcheck`).

When two gradients differ, all ranks that have not computed that shard compute it, and each rank reports its result to the coordinator. A
majority decides which rank's gradient was wrong. The digests travel beside the gradients, as those of the state do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.step.reduction import Reducer
from actors.rank.verify.replicas import BITS, digest
from actors.rank.verify.sumcheck import Flats, SumCheck
from fleet.protocol.types import Finding, StateId
from fleet.protocol.verification import NONE, Samples, Sampling, samples

WIDTH = 2
"""Numbers that each rank sends: the digest of its own sampled shard, and of the shard that it has computed again. 0: none."""


class Disputed(GroupBroken):
    """The ranks have computed different gradients for one shard, or different sums, and all have reported theirs."""


class Recheck:
    """One rank's part in the recheck.

    Args:
        budget: share of the compute that it may cost; 0: no shard is computed again.
        shards: of the run.
    """

    def __init__(self, budget: float, shards: int) -> None:
        self._sampling, self._shards = Sampling(budget=budget), shards
        self.width = WIDTH if budget > 0 else 0
        self._samples: Samples | None = None
        self._rank, self._generation = 0, -1
        self._digests: dict[int, int] = {}
        self._disputed: int | None = None
        self._complete = False
        self._here = self._passed = StateId(0, 0)
        self._ranges: Sequence[tuple[int, int]] = ()
        self.open: Finding | None = None

    def join(self, generation: int, rank: int, here: StateId, receiver: bool, ranges: Sequence[tuple[int, int]], whole: bool) -> None:
        """A view begins at ``here``. ``whole``: no shard of its step was computed before; else the step is not verified."""
        self._generation, self._rank, self._ranges = generation, rank, ranges
        if not receiver and here.history != self._passed.history:
            self._passed = here  # the history begins with this state
        self.begin(here, whole)

    def begin(self, here: StateId, whole: bool = True) -> None:
        """The step at state ``here`` begins."""
        self._here, self._digests, self._disputed, self.open = here, {}, None, None
        self._samples = samples(self._sampling, here.step, self._ranges, self._shards) if self.width and whole else None

    @property
    def wanted(self) -> tuple[int, ...]:
        """Shards that this rank should compute besides its own, for comparison."""
        if self._samples is None:
            return ()
        shard = self._disputed if self._disputed is not None else self._samples.checked[self._rank]
        return () if shard in self._digests or shard == NONE else (shard,)

    @property
    def verifies(self) -> bool:
        """Whether the current step is verified."""
        return self._samples is not None

    def samples(self, shard: int) -> bool:
        """Whether the gradient of ``shard`` is compared with another rank's: then :meth:`take` it."""
        return self._samples is not None and shard == self._samples.own[self._rank]

    def take(self, shard: int, gradient: Sequence[torch.Tensor | None]) -> None:
        """Keep the digest of this rank's gradient of ``shard``. A missing gradient differs from one of zeros."""
        there = [value.to_dense() if value.is_sparse else value for value in gradient if value is not None]
        size = sum(value.numel() * value.element_size() for value in there)
        missing = sum(1 << index for index, value in enumerate(gradient) if value is None)
        self._digests[shard] = ((digest(there, 0, size) ^ hash(missing)) & ((1 << BITS) - 1)) or 1

    def look(self) -> list[float]:
        """The numbers to send with the gradients."""
        if not self.width:
            return []
        if self._samples is None:
            return [0.0] * WIDTH
        mine = self._disputed if self._disputed is not None else self._samples.own[self._rank]
        if self._disputed is not None and mine in self._digests:
            self._testify(f"gradients of shard {mine}", f"{self._digests[mine]:013x}")
        return [float(self._digests.get(mine, 0)), float(self._digests.get(self._samples.checked[self._rank], 0))]

    def compare(self, rows: Sequence[Sequence[float]]) -> bool:
        """Compare all ranks' numbers. True when the step has to be repeated, so that all ranks compute the shard in dispute.

        Raises Disputed once they have.
        """
        if not self.width or self._samples is None:
            return False
        if self._disputed is not None:
            raise Disputed(f"the ranks differ in the gradients of shard {self._disputed}", self._generation)
        owners = {shard: row[0] for shard, row in zip(self._samples.own, rows, strict=True)}
        pairs = [(shard, owners[shard], row[1]) for shard, row in zip(self._samples.checked, rows, strict=True)]
        wrong = [shard for shard, own, again in pairs if own and again and own != again]
        if wrong:
            self._disputed = wrong[0]
            return True
        self._complete = all(own and again for shard, own, again in pairs if shard != NONE)
        return False

    def check_sums(self, group: Group, reducer: Reducer, partials: Sequence[Flats], out: Flats) -> None:
        """Compare the sums, too: after :meth:`compare`, when no shard is in dispute. Raises Disputed, once all ranks have reported."""
        assert self._samples is not None
        check = SumCheck(group, reducer, self._samples.owners, self._samples.number, partials, out)
        owner = check.differs() if reducer.kind == "ordered" else None
        if owner is not None:
            self._testify(f"the sum that rank {owner} of the view adds up", check.testify(owner))
            raise Disputed(f"the ranks differ in what rank {owner} of the view added up", self._generation)
        if self._complete:
            self._passed = self._here

    def _testify(self, what: str, text: str) -> None:
        self.open = Finding(what, self._generation, self._here, text, self._passed)
