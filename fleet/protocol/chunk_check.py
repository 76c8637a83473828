"""One rank's comparisons of the chunks of a sharded state that it keeps. Pure: live and simulated ranks use this same object.

No program changes a chunk between a commit and the next one. So each rank compares digests of its chunks with its own ones right behind the
commit. A rank that finds a difference is wrong, and says so beside its vote: the others need no majority.

The digests travel, too. If keepers of one chunk differ, and none has found a change, then the step itself went wrong on one of them. Two
digests do not tell on which one: all ranks go back. When they come to that step again, its bits are the same as before. So a keeper whose
digest differs from its earlier one was wrong then, if the digest of another keeper is the same as before. It says so beside its vote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from fleet.protocol.types import Finding, StateId

KEPT = "the chunks that a rank keeps"
"""A finding's ``what``: each rank says whether its own chunks are wrong, or were before."""
SOUND, CHANGED, REFUTED = "as behind the commit", "changed since the commit", "refuted by the same step, taken again"
CHUNK = "chunk"
"""The beginning of a finding's ``what`` on one chunk. Its keepers give their digests, the other ranks an empty one."""


class Said(IntEnum):
    """A rank's word on its own chunks. The last two are on the step in which keepers differed, and which is taken again."""

    SOUND = 0
    CHANGED = 1
    WRONG_THEN = 2
    RIGHT_THEN = 3


Row = tuple[Said, Sequence[object]]
"""Of one rank: its word, and the digests of its chunks."""


class _Open(NamedTuple):
    """This rank's digests in a comparison that ended without success: by number, of its chunks, which were ``chunks`` in all.

    ``number``: of the chunk on which keepers differed; None: this rank has not seen their digests.
    """

    at: StateId
    digests: Mapping[int, object]
    chunks: int
    number: int | None = None


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
        self._own: _Open | None = None
        self._tie: _Open | None = None

    def join(self, generation: int, here: StateId) -> None:
        """A view begins at state ``here``."""
        if self.open is not None and self._own is not None:
            self._tie = self._own
        self.generation, self.every, self.open, self._behind, self._own = generation, 1, None, None, None
        if here.history != self.cleared.history:
            self.cleared = here
        if self._tie is not None and here.history != self._tie.at.history and here.step >= self._tie.at.step:
            self._tie = None  # chunks of that state may have come from another keeper

    def due(self, here: StateId) -> bool:
        """Whether the chunks are compared in the vote on the step from ``here``, and so are digested behind the commit that led there."""
        return here.step % self.every == 0 or self._taken_again(here)

    def settle(self, here: StateId, digests: Sequence[object]) -> None:
        """Behind the commit that led to ``here``, these are the digests of this rank's chunks. Nothing may change them now."""
        self._behind = here, tuple(digests)

    def enter(self, here: StateId, digests: Sequence[object], numbers: Sequence[int], chunks: int) -> Said:
        """This rank's word before the vote on the step from ``here``.

        Args:
            digests: of the chunks that this rank keeps now.
            numbers: of these chunks, of which there are ``chunks`` in all.
        """
        changed = self._behind is not None and self._behind[0] == here and self._behind[1] != tuple(digests)
        self.open = Finding(KEPT, self.generation, here, CHANGED if changed else SOUND, self.cleared)
        self._own = _Open(here, dict(zip(numbers, digests, strict=True)), chunks)
        return Said.CHANGED if changed else self._again(self._own)

    def _taken_again(self, here: StateId) -> bool:
        """Whether keepers differed at this state, in a history that was given up."""
        return self._tie is not None and self._tie.at.step == here.step and self._tie.at.history != here.history

    def _again(self, own: _Open) -> Said:
        """This rank's word where the step was taken again. Other chunks than in the tie prove nothing."""
        tie = self._tie
        if tie is None or not self._taken_again(own.at) or tie.chunks != own.chunks:
            return Said.SOUND
        numbers = [each for each in own.digests if each in tie.digests and tie.number in (None, each)]
        if not numbers:
            return Said.SOUND
        return Said.RIGHT_THEN if all(own.digests[each] == tie.digests[each] for each in numbers) else Said.WRONG_THEN

    def differ(self, me: int, kept: Sequence[Sequence[int]], rows: Sequence[Row]) -> bool:
        """Whether the step must not be applied. Then :attr:`open` is this rank's testimony.

        Args:
            me: this view rank.
            kept: by view rank, the numbers of its chunks, in the order of its digests.
            rows: of all view ranks.
        """
        if self.open is None:
            return False
        assert self._own is not None
        if any(said is Said.CHANGED for said, _ in rows):
            self._testify(KEPT, me, {rank: CHANGED if said is Said.CHANGED else SOUND for rank, (said, _) in enumerate(rows)})
            return True
        here, found = self.open.state, _by_chunk(kept, rows)
        for number, by_rank in sorted(found.items()):
            if len(set(by_rank.values())) > 1:
                self._own = self._own._replace(number=number)
                self._testify(f"{CHUNK} {number} of {len(found)}", me, by_rank)
                return True
        tie = self._tie
        if tie is not None and tie.at.step <= here.step:
            self._tie = None
            words = {rank: rows[rank][0] for rank in found.get(-1 if tie.number is None else tie.number, ())}
            if {Said.WRONG_THEN, Said.RIGHT_THEN} <= set(words.values()):
                self._testify(KEPT, me, {rank: REFUTED if said is Said.WRONG_THEN else SOUND for rank, said in words.items()})
                return True
        self.open = None
        self.cleared = StateId(here.history, here.step + 1)
        return False

    def _testify(self, what: str, me: int, digests: Mapping[int, object]) -> None:
        """One rank that has seen what all keepers say is enough: the others may have left before."""
        assert self.open is not None
        seen = tuple((rank, str(digest)) for rank, digest in sorted(digests.items()))
        self.open = replace(self.open, what=what, digest=str(digests.get(me, "")), seen=seen)


def _by_chunk(kept: Sequence[Sequence[int]], rows: Sequence[Row]) -> dict[int, dict[int, object]]:
    """By chunk, the digests of its keepers by view rank."""
    found: dict[int, dict[int, object]] = defaultdict(dict)
    for rank, (numbers, (_, digests)) in enumerate(zip(kept, rows, strict=True)):
        for number, digest in zip(numbers, digests, strict=True):
            found[number][rank] = digest
    return found
