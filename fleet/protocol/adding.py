"""Which ranks add up the gradients of which chunks, where gradients leave a rank for others. Pure: live and simulated ranks use it.

With one shard a rank, the owner of a chunk adds up its gradients. Its loss means to compute the step again, which takes no longer than a
lost shard. With more shards than ranks, a guard adds them up, too, and the step goes on in the next view. A shard counts there if its
gradients are with all owners, and its rank is there to say its loss. A shard that is computed again has the same bits: its gradients count
once. Where ranks have compared their chunks without success, no gradient counts any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fleet.protocol.chunks import UNCUT, Chunk, StateCut, Turn
from fleet.protocol.probes import probe
from fleet.protocol.types import StateId

GRACE_S = 0.5
"""A rank that is called away waits so long for its contributions, and for a silent server: in most cases both sender and receiver work."""


class Adders:
    """The ranks of a view that add up, as one of them knows it.

    Args:
        shards: of the run.

    Attributes:
        cut: of the view; ``rank`` is this rank's number there. ``turn``: the attempt at the step.
        each: so many keepers of a chunk add up its gradients, the owner first.
        owned: numbers of the chunks that this rank owns; ``added``: that it adds up; ``guarded``: that it keeps and does not add up.
        agreed: all ranks know which shards of the step count in the view. Until then no contribution is taken.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self.cut, self.rank, self.turn = UNCUT, 0, Turn(-1, 0)
        self.each, self.agreed = 1, True
        self.owned, self.added, self.guarded = list[int](), list[int](), list[int]()
        self._goes_on = False
        self._began: StateId | None = None

    @property
    def twice(self) -> bool:
        """A guard adds up each chunk beside its owner."""
        return self.each > 1

    def place(self, cut: StateCut, rank: int, ranks: int, generation: int, here: StateId | None, *, inherited: bool) -> bool:
        """A view of so many ``ranks`` begins with ``cut``. Then call :meth:`agree`. Whether the step goes on.

        Args:
            here: the state of this rank.
            inherited: no chunk has moved.
        """
        goes_on = inherited and here is not None and self._began == here and self.cut.size == cut.size
        self.turn, self.rank, self.agreed = Turn(generation, 0), rank, False
        self.each = 1 + (self._shards > ranks)
        self.turn_to(cut)
        if not goes_on:
            self.begin_step(here)
        return goes_on

    def turn_to(self, cut: StateCut) -> None:
        """The ranks keep the chunks of another cut."""
        self.cut, self._goes_on = cut, False
        kept = [(index, keepers.index(self.rank)) for index, keepers in enumerate(cut.keepers) if self.rank in keepers]
        self.owned = [index for index, place in kept if place == 0]
        self.added = [index for index, place in kept if place < self.each]
        self.guarded = [index for index, place in kept if place >= self.each]

    def begin_step(self, here: StateId | None) -> None:
        """A step from ``here`` begins, without contributions."""
        self._began, self._goes_on = here, False

    def repeat(self) -> None:
        """All ranks compute the step once more."""
        self.turn = Turn(self.turn.generation, self.turn.attempt + 1)

    def agree(self, shards: Collection[int]) -> None:
        """These shards of the present step count in the view. If none does, :meth:`begin_step`, too."""
        self.agreed, self._goes_on = True, bool(shards)
        if shards:
            probe("shards count in another view whose gradients have left their rank")

    # ---- chunks, by their numbers --------------------------------------------------------------------------------------------------------

    def of(self, keepers: Sequence[int]) -> Sequence[int]:
        """The ranks that add up a chunk with these keepers."""
        return keepers[: self.each]

    @property
    def claimed(self) -> list[Chunk]:
        """See :attr:`fleet.protocol.chunks.Claim.adds`."""
        return [(self.cut.size, index) for index in self.added]

    def guards(self, index: int) -> Iterator[tuple[int, bool]]:
        """(a guard to which the owner of the chunk sends the mean, whether the guard needs it).

        Where a step goes on, a guard that adds up may lack shards.
        """
        for number, guard in enumerate(self.cut.keepers[index][1:], 1):
            needs = number >= self.each
            if needs or self._goes_on:
                yield guard, needs
