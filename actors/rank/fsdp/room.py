"""Whether a rank has room for gathered units: a unit that it cannot hold is refused before the first step, by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from actors.rank.fsdp.taken import Unit
from actors.rank.state.room import GIB
from fleet.errors import ConfigError
from fleet.protocol.chunks import AT_ONCE, LEAST_AT_ONCE

log = logging.getLogger("fleet.rank")


def check(units: Sequence[Unit], free: int) -> bool:
    """Check the units before the first step, while this rank still holds the whole model. Raises ConfigError: a unit is too large.

    Returns whether the next unit has room, too, while one computes.

    Args:
        free: bytes that are free beside the whole model; a model on ``meta`` takes none.
    """
    sizes = [sum(parameter.nbytes for parameter in unit.parameters) for unit in units]
    held = sum(parameter.nbytes for unit in units for parameter in unit.parameters if not parameter.is_meta)
    room, needed = free + held, sum(sorted(sizes)[-LEAST_AT_ONCE:])
    if needed > room:
        largest = max(range(len(units)), key=sizes.__getitem__)
        reason = (
            f"its parameters are {sizes[largest] / GIB:.3g} GiB, {LEAST_AT_ONCE} are gathered at once, {needed / GIB:.3g} GiB in all, "
            f"and this rank has room for {room / GIB:.3g} GiB"
        )
        way_out = "Call fully_shard on parts of it, so that less is gathered at once; or give each rank more memory."
        raise ConfigError("fully_shard", units[largest].name, reason, way_out)
    if (ahead := sum(sorted(sizes)[-AT_ONCE:])) > room:
        log.warning("no unit is gathered ahead: %.3g GiB for %d units, and this rank has room for %.3g", ahead / GIB, AT_ONCE, room / GIB)
    return ahead <= room
