"""One rank's comparisons of the chunks of a sharded state that it keeps. Pure: live and simulated ranks use this same object.

No program changes a chunk between a commit and the next one. So each rank compares digests of its chunks with its own ones right behind the
commit. A rank that finds a difference is wrong, and says so beside its vote: the others need no majority.

The digests travel, too. If keepers of one chunk differ, and none has found a change, then the step itself went wrong on one of them. Two
digests do not tell on which one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fleet.protocol.types import Finding, StateId

KEPT = "the chunks that a rank keeps"
"""A finding's ``what``: each rank says whether its own chunks have changed."""
SOUND, CHANGED = "as behind the commit", "changed since the commit"
CHUNK = "chunk"
"""The beginning of a finding's ``what`` on one chunk. Its keepers give their digests, the other ranks an empty one."""

Row = tuple[bool, Sequence[object]]
"""Of one rank: whether its chunks have changed, and the digests of its chunks."""


class ChunkCheck:
    """Follows the comparisons of one rank's views, and makes its testimony.

    Attributes:
        cleared: the state behind the newest one in which all chunks were found alike.
        every: the chunks are compared in every so many steps.
        open: this rank's finding of a comparison that it entered, and that has not ended with success.
    """

    def __init__(self) -> None:
        self.cleared = StateId(0, 0)
        self.generation = -1
        self.every = 1
        self.open: Finding | None = None
        self._behind: tuple[StateId, tuple[object, ...]] | None = None

    def join(self, generation: int, here: StateId) -> None:
        """A view begins at state ``here``."""
        self.generation, self.every, self.open, self._behind = generation, 1, None, None
        if here.history != self.cleared.history:
            self.cleared = here

    def due(self, here: StateId) -> bool:
        """Whether the chunks are compared in the vote on the step from ``here``, and so are digested behind the commit that led there."""
        return here.step % self.every == 0

    def settle(self, here: StateId, digests: Sequence[object]) -> None:
        """Behind the commit that led to ``here``, these are the digests of this rank's chunks. Nothing may change them now."""
        self._behind = here, tuple(digests)

    def enter(self, here: StateId, digests: Sequence[object]) -> bool:
        """Note this rank's digests before the vote on the step from ``here``. True: its chunks have changed since the commit."""
        changed = self._behind is not None and self._behind[0] == here and self._behind[1] != tuple(digests)
        self.open = Finding(KEPT, self.generation, here, CHANGED if changed else SOUND, self.cleared)
        return changed

    def differ(self, me: int, kept: Sequence[Sequence[int]], rows: Sequence[Row]) -> bool:
        """Whether the step must not be applied. Then :attr:`open` is this rank's testimony.

        Args:
            me: this view rank.
            kept: by view rank, the numbers of its chunks, in the order of its digests.
            rows: of all view ranks.
        """
        if self.open is None:
            return False
        if any(changed for changed, _ in rows):
            return True
        found: dict[int, dict[int, object]] = defaultdict(dict)
        for rank, (numbers, (_, digests)) in enumerate(zip(kept, rows, strict=True)):
            for number, digest in zip(numbers, digests, strict=True):
                found[number][rank] = digest
        for number, by_rank in sorted(found.items()):
            if len(set(by_rank.values())) > 1:
                self.open = replace(self.open, what=f"{CHUNK} {number} of {len(found)}", digest=str(by_rank.get(me, "")))
                return True
        here, self.open = self.open.state, None
        self.cleared = StateId(here.history, here.step + 1)
        return False
