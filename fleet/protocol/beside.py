"""Whether gradients travel beside the backward in a view. Pure: every rank of a view was told the same, and finds the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RankRoom(NamedTuple):
    """What a rank has: the address at which others reach its machine, and how many cores its process may use there."""

    host: str
    cores: float


def travels_beside(rooms: Sequence[RankRoom], cores_a_rank: float) -> bool:
    """Whether an exchange beside the backward can hide anything.

    Between machines there is a wire to wait for. Within one machine an exchange is all work, done by threads that need a core of their own:
    where the ranks have fewer than ``cores_a_rank`` each, those threads take the core from a backward. Four ranks on two cores
    then take 9 to 13% longer for a step (``docs/pace.md``).

    Args:
        rooms: of all ranks of the view, at least one.
        cores_a_rank: so many cores each rank has to have; 0: always.
    """
    if len({room.host for room in rooms}) > 1:
        return True
    return max(room.cores for room in rooms) >= cores_a_rank * len(rooms)
