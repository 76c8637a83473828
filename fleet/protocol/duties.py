"""Which shards of the step at hand one rank brings, and which it goes on with before it is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleet.protocol.shards import Shares, share
from fleet.protocol.types import Column, Member, StateId


class Duties:
    """What one rank was assigned in the last view, and what it speculates on for the next one. Pure: live and simulated ranks use it.

    Each column of a view has all shards of a step, so that a rank knows its own column alone.

    Attributes:
        at: the state that the step at hand begins from; None before the first.
        shares: of the step at hand, and ``whole``: of one that begins in the last view; the same object where that is so.
        contributed: by rank of the last column, the shards of the step at hand that it is to bring.
        had: the same by member.
        mine: of these, this rank's.
        ahead: what it speculates on beside them.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.at: StateId | None = None
        self.shares = self.whole = Shares((), ())
        self.contributed: list[list[int]] = []
        self.had: Mapping[Member, Sequence[int]] = {}
        self.mine: Sequence[int] = ()
        self.ahead: tuple[int, ...] = ()
        self._members: Sequence[Member] = ()
        self._rank = 0

    def rehearse(self) -> None:
        """Shard 0 is this rank's, in no view."""
        self.shares = self.whole = Shares(((),), ((0,),))
        self.mine, self._rank = (0,), 0

    def join(self, column: Column, rank: int, held: Sequence[Collection[int]], idle: Collection[int] = ()) -> Shares:
        """The ranks that bring each shard in ``column``: these go together, also when the next view breaks before its own are known.

        Args:
            rank: this rank's place in the column.
            held: by rank, what it has or has promised of the step at hand.
            idle: ranks that bring nothing.
        """
        self._members, self._rank = column.members, rank
        self.whole = share([()] * len(column.members), column.ranges, self.shards)
        begun = idle or any(held)
        return self._assign(share(held, column.ranges, self.shards, idle, column.giver) if begun else self.whole)

    def begin_step(self) -> Shares:
        """Nothing is computed of the step at hand: it is the next one, or is computed anew."""
        return self._assign(self.whole)

    def _assign(self, shares: Shares) -> Shares:
        self.shares, self.contributed = shares, shares.contributed(self.shards)
        self.had, self.mine, self.ahead = dict(zip(self._members, self.contributed, strict=True)), self.contributed[self._rank], ()
        return shares

    def speculate(self, column: Column, member: Member, here: StateId, idle: Collection[int]) -> bool:
        """What ``member`` will have to bring in ``column`` if all who receive no state there bring what they had to in the last one. False:
        nothing is known.

        Whoever knows better only makes it compute for nothing, as what counts is what all have promised.
        """
        if self.at != here or member not in self.had:
            return False
        if not self.ahead:
            held = [self.had.get(one, ()) if rank not in column.receivers else () for rank, one in enumerate(column.members)]
            self.ahead = share(held, column.ranges, self.shards, idle, column.giver).assigned[column.rank_of(member)]
        return True

    def assigned(self, held: Collection[int]) -> tuple[int, ...]:
        """What is to be computed yet by whoever holds ``held``."""
        return tuple(shard for shard in (*self.mine, *self.ahead) if shard not in held)

    @property
    def next_assigned(self) -> tuple[int, ...]:
        """What this rank is to compute of the step after the one at hand, if nothing comes between."""
        return self.whole.assigned[self._rank]

    @property
    def promised(self) -> tuple[int, ...]:
        """What this rank brings wherever it joins now: those that it has and those that it goes on with."""
        return (*self.mine, *self.ahead)
