"""In each verification of shards, the rank that computes another rank's shard again also adds up a slice of that rank's sum.

The owner of a chunk of the gradient adds it up and sends it to all, so all ranks get the same wrong sum. Its checker gets all ranks'
partial sums of a slice, and the owner's sum of them. When its own sum differs, all ranks add up that slice, and report their results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.rank.membership.process_group import Group
from actors.rank.step.reduction import Chunk, Reducer
from actors.rank.tags import Tag
from actors.rank.verify.replicas import BITS, digest

SLICES = 32
"""A bucket's chunk has so many slices. A verification checks one, so it adds one slice to the traffic of a bucket."""

Flats = Sequence[torch.Tensor]


class SumCheck:
    """One rank's part in one verification.

    Args:
        group, reducer: of the view.
        checked: by view rank, the rank whose sum it checks.
        number: of the verification; it selects the bucket and the slice, in turn.
        partials: the flat buffers of this rank's partial sums. ``out``: those of the mean, of which it owns a chunk.
    """

    def __init__(self, group: Group, reducer: Reducer, checked: Sequence[int], number: int, partials: Sequence[Flats], out: Flats) -> None:
        self._group, self._reducer, self._checked = group, reducer, checked
        self._partials, self._out = partials, out
        buckets = reducer.stretches(out)
        self._slices = [_slice(chunk, number // len(buckets)) for chunk in buckets[number % len(buckets)]]

    def differs(self) -> int | None:
        """The view rank whose sum is in dispute, the same on all ranks; None when all are right. Raises GroupBroken."""
        mine = self._checked[self._group.rank]
        given = torch.empty_like(self._at(self._out, mine))
        checker = self._checked.index(self._group.rank)
        sent = self._group.start([(self._at(self._out, self._group.rank), checker)], [(given, mine)], Tag.SUM)
        self._again = self._add_up(self._checked)
        sent.wait()
        wrong = not torch.equal(given.view(torch.uint8), self._again.view(torch.uint8))  # compares bits, as no NaN equals itself
        said = torch.zeros(self._group.size, 1, dtype=torch.float32, device="cpu")
        self._group.all_gather(said, torch.tensor([float(wrong)], dtype=torch.float32, device="cpu"), Tag.VERDICT)
        return next((self._checked[rank] for rank, yes in enumerate(said.flatten().tolist()) if yes), None)

    def testify(self, owner: int) -> str:
        """The digest of this rank's sum of the slice of ``owner``. The owner gives the sum that it sent, its checker the one found before,
        others add up now. Raises GroupBroken."""
        found = self._add_up([owner] * self._group.size)
        if self._group.rank == owner:
            found = self._at(self._out, owner)
        elif self._checked[self._group.rank] == owner:
            found = self._again
        return f"{digest([found], 0, found.numel() * found.element_size()) & ((1 << BITS) - 1):013x}"

    def _add_up(self, wanted: Sequence[int]) -> torch.Tensor:
        """The slice that this rank wants, of the sum of rank ``wanted[rank]``, from all ranks' partial sums."""
        me, counts = self._group.rank, self._reducer.counts
        own = [self._at(flats, wanted[me]) for flats in self._partials]
        found = {peer: [torch.empty_like(self._at(self._out, wanted[me])) for _ in range(counts[peer])] for peer in self._group.peers}
        sends = [(self._at(flats, wanted[peer]), peer) for peer in self._group.peers for flats in self._partials]
        self._group.start(sends, [(part, peer) for peer in self._group.peers for part in found[peer]], Tag.PARTIALS).wait()
        again = torch.empty_like(self._at(self._out, wanted[me]))
        self._reducer.add_up(*self._reducer.in_order({**found, me: own}), again)
        return again

    def _at(self, flats: Flats, owner: int) -> torch.Tensor:
        flat, lo, hi = self._slices[owner]
        return flats[flat][lo:hi]


def _slice(chunk: Chunk, number: int) -> Chunk:
    length = -(-(chunk.hi - chunk.lo) // SLICES)
    lo = min(chunk.lo + number % SLICES * length, chunk.hi)
    return Chunk(chunk.flat, lo, min(lo + length, chunk.hi))
