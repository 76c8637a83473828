"""Which shards of the step at hand one rank brings, and which it goes on with before it is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleet.protocol.shards import speculative
from fleet.protocol.types import Member, StateId, View


class Duties:
    """What one rank was assigned in the last view, and what it speculates on for the next one. Pure: live and simulated ranks use it.

    Attributes:
        at: the state that the step at hand begins from; None before the first.
        had: by member of the last view, what it was to bring.
        mine: of these, this rank's.
        ahead: what it speculates on beside them.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.at: StateId | None = None
        self.had: Mapping[Member, Sequence[int]] = {}
        self.mine: Sequence[int] = ()
        self.ahead: tuple[int, ...] = ()

    def assign(self, members: Sequence[Member], contributed: Sequence[Sequence[int]], rank: int) -> None:
        """By view rank, what all bring. These go together, also when the next view breaks before it is known who brings what there."""
        self.had, self.mine, self.ahead = dict(zip(members, contributed, strict=True)), contributed[rank], ()

    def speculate(self, view: View, member: Member, here: StateId, idle: Collection[int]) -> bool:
        """What ``member`` will have to bring in ``view`` if all others bring what they had to in the last one. False: nothing is known.

        Whoever knows better only makes it compute for nothing, as what counts is what all have promised.
        """
        if self.at != here or member not in self.had:
            return False
        if not self.ahead:
            self.ahead = speculative(self.had, view, member, self.shards, idle)
        return True

    def assigned(self, held: Collection[int]) -> tuple[int, ...]:
        """What is to be computed yet by whoever holds ``held``."""
        return tuple(shard for shard in (*self.mine, *self.ahead) if shard not in held)

    @property
    def promised(self) -> tuple[int, ...]:
        """What this rank brings wherever it joins now: those that it has and those that it goes on with."""
        return (*self.mine, *self.ahead)
