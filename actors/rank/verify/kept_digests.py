"""Owners and guards of chunks compare digests of them beside each vote. :mod:`fleet.protocol.chunk_check` says what they prove.

A chunk is digested with its parameters and its optimizer's state, behind a commit and before the vote on the next one. If that would take
more than its share of a step, it happens in every second step, or fourth, and so on. The ranks agree on that beside their votes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.state.tracked import flat_bytes
from actors.rank.verify.replicas import BITS, REFRESH_STEPS, DigestShare, digest, of_arrays
from actors.rank.zero1.kept import KeptChunks
from fleet.errors import LoopError
from fleet.protocol.chunk_check import ChunkCheck, Said
from fleet.protocol.chunks import UNCUT, StateCut
from fleet.protocol.types import Finding, StateId

FRESH = 6
"""So many digests look up the memory anew when a view has begun or chunks are in new places: an optimizer makes its state then."""
MOST_STEPS = 64
"""The chunks are compared in one of so many steps at least."""
HEAD = 3
"""Numbers that a rank sends before its digests: the steps from one comparison to the next, as it wants them. Whether it compares now. Its
word on its chunks."""
PROGRAM = "Tracked objects change in step.commit() only. Give this change to step.on_commit(fn), or do not track the object it changes."


class ChunksDiffer(GroupBroken):
    """A rank holds wrong chunks."""


class KeptDigests:
    """Compares this rank's chunks with their other keepers'.

    Args:
        kept: the chunks of this rank.
        budget: share of a step's time that the digests may take; 0: no comparison.
    """

    def __init__(self, kept: KeptChunks, budget: float) -> None:
        self._kept, self._budget, self._check = kept, budget, ChunkCheck()
        self._group: Group | None = None
        self._memory = list[list[torch.Tensor]]()
        self._arrays: list[list[Any]] | None = None  # the same memory as arrays, for a quicker loop, if all is on the host
        self._cut, self._fresh = UNCUT, 0
        self._listed: StateCut | None = None
        self._lists = list[list[int]]()
        self._share = DigestShare(budget)

    @property
    def width(self) -> int:
        """Numbers of a row: the same on all ranks of the view."""
        if self._budget <= 0 or self._group is None:
            return 0
        return HEAD + max(map(len, self._numbers))

    @property
    def _numbers(self) -> list[list[int]]:
        """By view rank, the numbers of its chunks; made once for each cut, as views of many ranks have many chunks."""
        cut = self._kept.cut
        if cut is not self._listed:
            assert self._group is not None
            self._listed, self._lists = cut, [mine + more for mine, more in zip(*cut.by_rank(self._group.size), strict=True)]
        return self._lists

    @property
    def testimony(self) -> Finding | None:
        """This rank's report if it leaves its group now."""
        return self._check.open

    def join(self, group: Group, generation: int, here: StateId) -> None:
        """A view begins at state ``here``, with the ranks of ``group``."""
        self._group, self._fresh, self._listed = group, FRESH, None
        self._share.begin()
        self._check.join(generation, here)

    def due(self, here: StateId) -> bool:
        """Whether the chunks are compared before the step from ``here``."""
        return bool(self.width) and self._check.due(here)

    def settle(self, here: StateId) -> None:
        """The commit that led to ``here`` is over, and nothing changes the chunks from now on."""
        if self.due(here):
            self._look_up(here)
            self._check.settle(here, self._digest())

    def look(self, here: StateId) -> list[float]:
        """The numbers to send beside the vote on the step at ``here``."""
        if not self._check.due(here):
            return [float(self._share.divided(self._check.every, MOST_STEPS, None)), *[0.0] * (self.width - 1)]
        fresh, begin_s = self._look_up(here), time.perf_counter()
        digests = self._digest()
        both_s = 2 * (time.perf_counter() - begin_s)  # behind the commit, too
        assert self._group is not None
        said = self._check.enter(here, digests, self._numbers[self._group.rank], self._kept.cut.size)
        wanted = self._share.divided(self._check.every, MOST_STEPS, None if fresh else both_s)
        row = [float(wanted), 1.0, float(said), *map(float, digests)]
        return [*row, *[0.0] * (self.width - len(row))]

    def compare(self, rows: Sequence[Sequence[float]]) -> None:
        """Compare all ranks' numbers, in order. Raises ChunksDiffer: the step must not be applied; LoopError where several ranks' chunks
        have changed."""
        group = self._group
        if group is None or not self.width or len(rows) < 2:
            return
        numbers = self._numbers
        said = [(Said(int(row[2])), row[HEAD : HEAD + len(chunks)]) for row, chunks in zip(rows, numbers, strict=True)]
        if all(row[1] for row in rows) and self._check.differ(group.rank, numbers, said):
            changed = [rank for rank, (word, _) in enumerate(said) if word is Said.CHANGED]
            if len(changed) > 1:
                raise LoopError(
                    f"chunks of the state have changed since the last commit, on {len(changed)} of {len(rows)} ranks. {PROGRAM}"
                )
            raise ChunksDiffer("the chunks of a rank are wrong", self._check.generation)
        self._check.open = None
        self._check.every = int(max(row[0] for row in rows))

    def _digest(self) -> list[int]:
        if self._arrays is None:
            found = [digest(tensors, 0, sum(one.numel() for one in tensors)) for tensors in self._memory]
        else:
            found = [of_arrays(arrays) for arrays in self._arrays]
        return [one & ((1 << BITS) - 1) for one in found]

    def _look_up(self, here: StateId) -> bool:
        """Look up the memory of the chunks: all ranks in the same steps, since an optimizer may replace a tensor of its state. False: there
        is no need."""
        cut = self._kept.cut
        if cut is not self._cut:
            self._cut, self._fresh = cut, FRESH
        if not self._fresh and here.step % REFRESH_STEPS:
            return False
        assert self._group is not None
        self._fresh = max(0, self._fresh - 1)
        held = self._kept.chunks.memory_of(cut.kept(self._group.rank))
        self._memory = [[flat_bytes(one) for one in tensors] for tensors in held]
        flat = all(one.device.type == "cpu" for tensors in self._memory for one in tensors)
        self._arrays = [[one.numpy() for one in tensors] for tensors in self._memory] if flat else None
        return True
