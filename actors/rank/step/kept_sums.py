"""The sums of a step that others may have taken: a rank that has reported them keeps them until it knows (:mod:`fleet.protocol.vote`)."""

from __future__ import annotations

from actors.rank.step.flats import GradientSet
from actors.rank.step.gradients import GradientBuffers
from fleet.protocol.vote import CommitVote


class KeptSums:
    """Those of one rank."""

    def __init__(self, gradients: GradientBuffers, vote: CommitVote) -> None:
        self._gradients, self._vote = gradients, vote
        self._sums: GradientSet | None = None

    def hold(self) -> None:
        """The group is gone: keep the sums from which this rank may still take the step."""
        if self._vote.keeps and self._sums is None:
            self._sums = self._gradients.take_mean()

    def forget(self) -> None:
        """Drop the kept sums: no step is taken from them."""
        if self._sums is not None:
            self._gradients.give_mean(self._sums)
            self._gradients.hold()
            self._sums = None

    def resume(self) -> None:
        """Make the kept sums those of the current step, which others have taken."""
        assert self._sums is not None, "a step that others have taken lacks its sums"
        self._gradients.give_mean(self._sums)
        self._sums = None
