"""What a reduction told every rank."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.protocol.member import Offer


@dataclass(frozen=True, slots=True)
class ReductionOutcome:
    """What a reduction told every rank alike.

    ``weights``, by shard, when the loop gives them, else ();
    ``offers`` are all ranks' (see ``MemberProtocol.offer``); ``loss`` the mean over shards; ``culprit`` the first shard whose loss is not
    finite, or is far too large, -1 when only their gradient is, None when all is well, and ``why`` says so in words; ``owner`` is the view
    rank that computed it; ``hopeless``: there is no use in going on if that comes out again. ``disputed``: two ranks have computed other
    gradients for a shard than each other, so the loop body runs again for those who have not.
    """

    offers: list[Offer]
    loss: float
    culprit: int | None
    why: str = ""
    disputed: bool = False
    owner: int = -1
    hopeless: bool = False
    weights: tuple[float, ...] = ()

    @property
    def repeats(self) -> bool:
        """The step is computed once more."""
        return self.culprit is not None
