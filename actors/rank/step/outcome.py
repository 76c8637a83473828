"""The result of a reduction, which is the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleet.errors import FleetError
from fleet.protocol.member import Offer
from fleet.protocol.vote import Doubt


class NonFiniteError(FleetError):
    """A shard's loss or the gradient is not a finite number, twice in a row: the model or the data cause it, not the hardware."""


@dataclass(frozen=True, slots=True)
class ReductionOutcome:
    """The result of a reduction, which is the same on all ranks.

    ``offers`` are those of all ranks (see ``MemberProtocol.offer``); ``loss`` is the mean over shards. ``doubt`` names the shard whose loss
    is not finite, or far too large. ``norm_limit`` is the largest usual norm of the gradient. ``disputed``: two ranks have computed
    different gradients for one shard, so ranks that have not computed it run the loop body for it. ``weights``, by shard, when the loop
    gives them, else (). ``collects``: all ranks collect garbage behind the step.
    """

    offers: list[Offer]
    loss: float
    doubt: Doubt | None = None
    norm_limit: float = math.inf
    disputed: bool = False
    weights: tuple[float, ...] = ()
    collects: bool = False
