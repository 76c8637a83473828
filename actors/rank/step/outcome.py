"""What a reduction told every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleet.errors import FleetError
from fleet.protocol.member import Offer
from fleet.protocol.vote import Doubt


class NonFiniteError(FleetError):
    """A shard's loss or the gradient is not a finite number, twice in a row: it is the model or the data, not the hardware."""


@dataclass(frozen=True, slots=True)
class ReductionOutcome:
    """What a reduction told every rank alike.

    ``offers`` are all ranks' (see ``MemberProtocol.offer``); ``loss`` the mean over shards; ``doubt`` names the shard whose loss is not
    finite, or far too large, and ``norm_limit`` is what the norm of the gradient is usually below. ``disputed``: two ranks have computed
    other gradients for a shard than each other, so the loop body runs again for those who have not. ``weights``, by shard, when the loop
    gives them, else ().
    """

    offers: list[Offer]
    loss: float
    doubt: Doubt | None = None
    norm_limit: float = math.inf
    disputed: bool = False
    weights: tuple[float, ...] = ()
