"""The vote that commits a step: the ranks' words on its sums, the ranks that vote, and the result.

Pure: live and simulated ranks use this same object. The rank machine asks it, and a driver collects the words in between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fleet.protocol.chunks import Chunk, Claim, added, follows
from fleet.protocol.types import StateId


class VotePhase(StrEnum):
    """The phase of the vote on the present step.

    ``open``: no rank has voted. ``ready``: this rank has its sums, and the others may know this. ``commit``: the step is taken. ``again``:
    all ranks compute it once more.
    """

    OPEN = "open"
    READY = "ready"
    COMMIT = "commit"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Doubt:
    """The reason to reject a step: its shard, -1 where the sum alone is strange, and ``why`` in words.

    ``hopeless``: the run cannot go on if the step gives the same again.
    """

    shard: int
    why: str
    hopeless: bool


@dataclass(frozen=True, slots=True)
class Words:
    """The ranks' words on the sums of a step.

    Attributes:
        finite: by voting rank, whether its sums are all finite.
        norm: norm of the gradient; NaN where it is not known.
        factor: multiplier that clips a finite gradient.
        skips: a gradient scaler skips the update where a gradient is not finite.
    """

    finite: tuple[bool, ...]
    norm: float = math.nan
    factor: float = 1.0
    skips: bool = False


class CommitVote:
    """One rank's vote, on one step after the other.

    Ranks that have the whole sum have the same sum, so each derives the votes of the others. With sharded state (``spread``), a rank has
    the sums of its own chunks alone. Then no rank takes the step before all ranks have said that they have their sums. A rank that has said
    so keeps its sums until the result of the step is known. If other ranks have taken the step, it takes the step, too.

    Attributes:
        factor: multiplier of the gradients of the last committed step; NaN where that step was skipped.
    """

    def __init__(self, *, spread: bool) -> None:
        self.spread, self.phase, self.factor = spread, VotePhase.OPEN, 1.0

    def begin(self) -> None:
        """Another step or attempt begins. Of the last vote the factor alone stays: a rank that takes that step later needs it."""
        self.phase = VotePhase.OPEN

    def voters(self, size: int) -> tuple[int, ...]:
        """The ranks of a view of ``size`` that exchange votes; none where each rank derives the same result by itself."""
        return tuple(range(size)) if self.spread else ()

    def reject(self, doubt: Doubt) -> Doubt:
        """The step is rejected. All ranks find the same."""
        assert self.phase in (VotePhase.OPEN, VotePhase.READY), f"a step is rejected whose vote is {self.phase}"
        self.phase = VotePhase.AGAIN
        return doubt

    def ready(self) -> None:
        """This rank has all its sums, and is about to say so."""
        assert self.phase is VotePhase.OPEN, f"a vote is begun that is {self.phase}"
        self.phase = VotePhase.READY

    def decide(self, words: Words, norm_limit: float) -> Doubt | None:
        """The result of all votes: the doubt against the step, or None, and it is taken. A norm above ``norm_limit`` is unusual."""
        assert self.phase is VotePhase.READY, f"a step is decided whose vote is {self.phase}"
        finite = all(words.finite)
        if not (finite or words.skips):
            return self.reject(Doubt(-1, "the gradient is not finite, though every loss is", True))
        if words.norm > norm_limit:
            return self.reject(Doubt(-1, f"the gradient's norm is {words.norm:.4g}, and up to {norm_limit:.4g} is usual", False))
        self.phase, self.factor = VotePhase.COMMIT, words.factor if finite else math.nan
        return None

    def lost(self) -> None:
        """The group is gone. Other ranks may have got this rank's vote, and may take the step: a ready rank keeps its sums."""
        if not self.keeps:
            self.phase = VotePhase.OPEN

    @property
    def keeps(self) -> bool:
        """This rank keeps its sums, and can take the step without any peer."""
        return self.phase in (VotePhase.READY, VotePhase.COMMIT)

    def claim(
        self,
        at: StateId | None,
        chunks: tuple[Chunk, ...],
        beside: tuple[Chunk, ...],
        *,
        complete: bool,
        node: int,
        adding: Collection[Chunk] = (),
    ) -> Claim:
        """This rank's claim when a view begins, for its ``chunks`` of the state ``at``. ``beside``: chunks that came for a view that did
        not form. A rank that can take the step takes it with ``chunks`` alone. ``complete``, ``node`` and ``adding``: see
        :class:`Claim`."""
        if at is None:
            return Claim(None, node=node)
        return Claim(at, self.keeps, self.factor, complete, node, chunks + (() if self.keeps else beside), adds=added(chunks, adding))

    def follow(self, claims: Sequence[Claim], me: int, target: StateId) -> bool:
        """Whether this rank has to take, from its kept sums and with their factor, a step to ``target`` that other ranks have taken.

        Args:
            claims: those of all members, by view rank; ``me`` is this rank.
        """
        if not follows(claims[me], target):
            return False
        self.phase, self.factor = VotePhase.COMMIT, next(claim.factor for claim in claims if claim.state == target)
        return True
