"""Whether gradients travel beside the backward in a view. Pure: all ranks of a view have the same input, so all get the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RankRoom(NamedTuple):
    """The address of a rank's machine, as other ranks reach it, and the number of cores that its process may use there."""

    host: str
    cores: float


def travels_beside(rooms: Sequence[RankRoom], cores_a_rank: float) -> bool:
    """Whether an exchange beside the backward can hide anything.

    Between machines an exchange waits for a wire, and that wait can hide. Within one machine an exchange is work alone, by threads that
    need a core of their own. Where the ranks have fewer than ``cores_a_rank`` each, those threads take the core from a backward. Four
    ranks on two cores then take 9 to 13% longer for a step (``docs/pace.md``).

    Args:
        rooms: of all ranks of the view, at least one.
        cores_a_rank: number of cores that each rank must have, if all are on one machine; 0: gradients always travel beside.
    """
    if len({room.host for room in rooms}) > 1:
        return True
    return max(room.cores for room in rooms) >= cores_a_rank * len(rooms)
