"""In which order ranks compute the units of a pipeline. Pure: live and simulated ranks use it.

A model is cut into *stages*. A *unit* is one shard at one stage: its forward, and later its backward. A rank computes units of one stage.
All ranks derive the same order from the shards that the ranks of each stage compute. So a message needs no number: both ends know its unit.

The order is that of a list schedule in which a forward takes one tick and a backward two. A rank prefers a backward. It begins a forward
only while fewer units wait for their backward than stages follow, its own among them. So memory for activations does not grow with the
number of shards. Where each stage has as many ranks, this is 1F1B.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

FORWARD_TICKS, BACKWARD_TICKS = 1, 2
"""How long the schedule takes a forward and a backward to be."""


class Half(IntEnum):
    """One half of a unit."""

    FORWARD = 0
    BACKWARD = 1


class UnitHalf(NamedTuple):
    """One half of one unit, on the rank that computes it."""

    half: Half
    shard: int


Turns = list[UnitHalf]
Assigned = Sequence[Sequence[Sequence[int]]]
"""By stage, by place in the stage's column: the shards whose units of this stage the rank computes. Each shard comes once in each stage."""


class Order(NamedTuple):
    """The turns of all ranks, by stage and place, and the ticks until the last one is over."""

    turns: tuple[tuple[Turns, ...], ...]
    ticks: int


class _Rank:
    """One rank while the schedule is made: the halves that it can begin, in order of the shard."""

    def __init__(self) -> None:
        self.ready: tuple[list[int], list[int]] = ([], [])
        self.waiting, self.busy = 0, False
        self.turns: Turns = []

    def next(self, most: int) -> UnitHalf | None:
        """The turn to begin now, taken off the lists; None: nothing can begin. ``most``: so many units may wait for their backward."""
        forwards, backwards = self.ready
        if backwards:
            self.waiting -= 1
            return UnitHalf(Half.BACKWARD, heapq.heappop(backwards))
        if forwards and self.waiting < most:
            self.waiting += 1
            return UnitHalf(Half.FORWARD, heapq.heappop(forwards))
        return None


def order(assigned: Assigned) -> Order:
    """The order in which all ranks compute their units.

    No rank waits for ever: the last stage ends each unit that it begins, and so does each stage whose next one does.

    Raises:
        ValueError: the stages do not compute the same shards.
    """
    stages = [sorted(shard for shards in column for shard in shards) for column in assigned]
    if any(shards != stages[0] for shards in stages) or len(set(stages[0])) < len(stages[0]):
        raise ValueError(f"the stages of a pipeline compute other shards than each other: {stages}")
    places = [{shard: place for place, shards in enumerate(column) for shard in shards} for column in assigned]
    ranks = [[_Rank() for _ in column] for column in assigned]
    for place, shards in enumerate(assigned[0]):
        ranks[0][place].ready[Half.FORWARD].extend(sorted(shards))
    ended: list[tuple[int, int, int, UnitHalf]] = []  # (tick, stage, place, turn)
    now, last = 0, len(assigned) - 1

    def begin(stage: int, place: int) -> None:
        rank = ranks[stage][place]
        turn = None if rank.busy else rank.next(last - stage + 1)
        if turn is not None:
            rank.busy = True
            rank.turns.append(turn)
            heapq.heappush(ended, (now + (BACKWARD_TICKS if turn.half else FORWARD_TICKS), stage, place, turn))

    def make_ready(stage: int, turn: UnitHalf) -> None:
        heapq.heappush(ranks[stage][places[stage][turn.shard]].ready[turn.half], turn.shard)

    for place in range(len(assigned[0])):
        begin(0, place)
    while ended:
        now, touched = ended[0][0], set[tuple[int, int]]()
        while ended and ended[0][0] == now:
            _, stage, place, turn = heapq.heappop(ended)
            ranks[stage][place].busy = False
            touched.add((stage, place))
            at_end = stage == (0 if turn.half else last)
            to, half = (stage, Half.BACKWARD) if at_end else (stage - 1 if turn.half else stage + 1, turn.half)
            if not (at_end and turn.half):
                make_ready(to, UnitHalf(half, turn.shard))
                touched.add((to, places[to][turn.shard]))
        for stage, place in sorted(touched):
            begin(stage, place)
    return Order(tuple(tuple(rank.turns for rank in column) for column in ranks), now)
