"""The shards of the present step that a rank brings, and the shards that it computes before a view assigns them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleet.protocol.shards import Shares, share
from fleet.protocol.types import Column, Member, StateId


class Duties:
    """A rank's assigned shards of the last view, and its speculation for the next one. Pure: live and simulated ranks use it.

    Each column of a view has all shards of a step, so a rank has to know its own column alone.

    Attributes:
        at: the state from which the present step begins; None before the first step.
        shares: the shares of the present step. ``whole``: those of a step that begins in the last view; the same object for such a step.
        contributed: by rank of the last column, the shards of the present step that the rank has to bring.
        had: the same by member.
        mine: this rank's shards of them.
        ahead: shards that this rank speculates on beside them.
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
        """Assign shard 0 to this rank, outside of any view."""
        self.shares = self.whole = Shares(((),), ((0,),))
        self.mine, self._rank = (0,), 0

    def join(self, column: Column, rank: int, held: Sequence[Collection[int]], idle: Collection[int] = ()) -> Shares:
        """The shares of the present step in ``column``. They stay the last known ones if the next view breaks before it has its own.

        Args:
            rank: this rank's place in the column.
            held: by rank, the shards of the present step that the rank has or has promised.
            idle: ranks that bring no shards.
        """
        self._members, self._rank = column.members, rank
        self.whole = share([()] * len(column.members), column.ranges, self.shards)
        begun = idle or any(held)
        return self._assign(share(held, column.ranges, self.shards, idle, column.giver) if begun else self.whole)

    def begin_step(self) -> Shares:
        """A step begins, the next one or the same one again: no shard of it is computed."""
        return self._assign(self.whole)

    def _assign(self, shares: Shares) -> Shares:
        self.shares, self.contributed = shares, shares.contributed(self.shards)
        self.had, self.mine, self.ahead = dict(zip(self._members, self.contributed, strict=True)), self.contributed[self._rank], ()
        return shares

    def speculate(self, column: Column, member: Member, here: StateId, idle: Collection[int]) -> bool:
        """Guess the shards of ``member`` in ``column``: members that receive no state there keep the shards of the last column. False: no
        guess is possible.

        A wrong guess costs computing alone, since the promises of all members decide.
        """
        if self.at != here or member not in self.had:
            return False
        if not self.ahead:
            held = [self.had.get(one, ()) if rank not in column.receivers else () for rank, one in enumerate(column.members)]
            self.ahead = share(held, column.ranges, self.shards, idle, column.giver).assigned[column.rank_of(member)]
        return True

    def assigned(self, held: Collection[int]) -> tuple[int, ...]:
        """This rank's shards that are not in ``held``: it still has to compute these."""
        return tuple(shard for shard in (*self.mine, *self.ahead) if shard not in held)

    @property
    def next_assigned(self) -> tuple[int, ...]:
        """This rank's shards of the step after the present one, if the view stays."""
        return self.whole.assigned[self._rank]

    @property
    def promised(self) -> tuple[int, ...]:
        """The shards that this rank brings into the next view: its own, and those that it speculates on."""
        return (*self.mine, *self.ahead)
