"""The vote that commits a step: what is said of its sums, by whom, and what becomes of the step by that.

Pure: live and simulated ranks are driven by this very object. The rank machine asks it; a driver collects the words in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fleet.protocol.chunks import Chunk, Claim, follows
from fleet.protocol.types import StateId


class VotePhase(StrEnum):
    """How far the vote on the step at hand is.

    ``open``: nothing was said yet. ``ready``: this rank's sums are here, and the others may have heard so. ``commit``: the step is taken.
    ``again``: all compute it once more.
    """

    OPEN = "open"
    READY = "ready"
    COMMIT = "commit"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a step is not to be taken: its shard, -1 where only the sum of all is strange, and in words.

    ``hopeless``: there is no use in going on if that comes out again.
    """

    shard: int
    why: str
    hopeless: bool


@dataclass(frozen=True, slots=True)
class Words:
    """The ranks' words on the sums of a step.

    Attributes:
        finite: of each who was asked, whether all that it has summed is.
        norm: of the gradient; not a number where it is not known.
        factor: by which a finite gradient is multiplied, so that it is clipped.
        skips: what is not finite is the business of a gradient scaler, which skips the update.
    """

    finite: tuple[bool, ...]
    norm: float = math.nan
    factor: float = 1.0
    skips: bool = False


class CommitVote:
    """One rank's vote, on one step after the other.

    Ranks that have all of the sum have the same, so that each knows by itself what the others find. Where the state is ``spread``, a rank
    has the sums of its own chunks alone: nobody takes the step before all have said that they have theirs. A rank that has said so
    keeps them until it is clear what became of the step, and takes it behind those who have.

    Attributes:
        factor: by which the gradients of the last committed step were multiplied; not a number where that was skipped.
    """

    def __init__(self, *, spread: bool) -> None:
        self.spread, self.phase, self.factor = spread, VotePhase.OPEN, 1.0

    def begin(self) -> None:
        """Another step, or another attempt at it. The last vote is over, but for its factor: a rank that follows asks for that."""
        self.phase = VotePhase.OPEN

    def voters(self, size: int) -> tuple[int, ...]:
        """The ranks of a view of ``size`` that tell each other; none where each finds the same by itself."""
        return tuple(range(size)) if self.spread else ()

    def reject(self, doubt: Doubt) -> Doubt:
        """The step is not to be taken: all find so alike."""
        assert self.phase in (VotePhase.OPEN, VotePhase.READY), f"a step is rejected whose vote is {self.phase}"
        self.phase = VotePhase.AGAIN
        return doubt

    def ready(self) -> None:
        """All sums of this rank are here, and it is about to say so."""
        assert self.phase is VotePhase.OPEN, f"a vote is begun that is {self.phase}"
        self.phase = VotePhase.READY

    def decide(self, words: Words, norm_limit: float) -> Doubt | None:
        """What all voters have said: why the step is rejected, or None, and it is taken. ``norm_limit``: larger ones are not usual."""
        assert self.phase is VotePhase.READY, f"a step is decided whose vote is {self.phase}"
        finite = all(words.finite)
        if not (finite or words.skips):
            return self.reject(Doubt(-1, "the gradient is not finite, though every loss is", True))
        if words.norm > norm_limit:
            return self.reject(Doubt(-1, f"the gradient's norm is {words.norm:.4g}, and up to {norm_limit:.4g} is usual", False))
        self.phase, self.factor = VotePhase.COMMIT, words.factor if finite else math.nan
        return None

    def lost(self) -> None:
        """The group is gone. A rank's word that it is ready may have been received: others may take the step by it."""
        if not self.keeps:
            self.phase = VotePhase.OPEN

    @property
    def keeps(self) -> bool:
        """The sums are kept: this rank can take the step without any peer."""
        return self.phase in (VotePhase.READY, VotePhase.COMMIT)

    def claim(self, at: StateId | None, chunks: tuple[Chunk, ...], beside: tuple[Chunk, ...], *, complete: bool, node: int) -> Claim:
        """What this rank says when a view begins, where it keeps ``chunks`` of the state ``at``; ``beside`` came for a view that did not
        come about. A rank that can take the step takes it with the first ones alone. ``complete`` and ``node``: see :class:`Claim`."""
        if at is None:
            return Claim(None, node=node)
        return Claim(at, self.keeps, self.factor, complete, node, chunks + (() if self.keeps else beside))

    def follow(self, claims: Sequence[Claim], me: int, target: StateId) -> bool:
        """Whether others have taken a step to ``target`` that this rank is to take now, from the sums that it keeps, with their factor.

        Args:
            claims: of all members, by view rank; ``me`` is this one's.
        """
        if not follows(claims[me], target):
            return False
        self.phase, self.factor = VotePhase.COMMIT, next(claim.factor for claim in claims if claim.state == target)
        return True
