"""In which order ranks compute the units of a pipeline. Pure: live and simulated ranks use it.

A model is cut into *stages*. A *unit* is one shard at one stage: its forward, and later its backward. A rank computes units of one stage.
All ranks derive the same order from the shards that the ranks of each stage compute. So each knows from which rank a message comes.

The order is that of a list schedule in which a forward takes one tick and a backward two. A rank prefers a backward. It begins a forward
only while fewer units wait for their backward than stages follow, its own among them, for each rank beside it. So memory for activations
does not grow with the number of shards. Where each stage has as many ranks, this is 1F1B.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from functools import cached_property, partial
from typing import NamedTuple

from fleet.protocol.shards import share
from fleet.protocol.types import STAGE, Member, View, by_stage

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
    """One rank while the schedule is made.

    Attributes:
        ready: by half, shards of halves that it can begin, with the tick since when. ``busy``: it computes a half.
        waiting: units that wait for their backward. ``coming``: forwards that an earlier stage has begun, or that are ready.
        ways: so many ranks of one stage next to it compute its shards.
    """

    def __init__(self) -> None:
        self.ready: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.waiting = self.coming = 0
        self.ways = 1
        self.busy = False
        self.turns: Turns = []

    def next(self, most: int, behind: Callable[[int], int]) -> UnitHalf | None:
        """The half to begin now, taken off the lists; None: nothing can begin.

        Args:
            most: so many units may wait for their backward.
            behind: how many forwards are on their way to the rank that has a shard next. Forwards go first to those with few.
        """
        forwards, backwards = self.ready
        if backwards:
            shard = min(backwards, key=lambda one: (backwards[one], one))
            del backwards[shard]
            self.waiting -= 1
            return UnitHalf(Half.BACKWARD, shard)
        if forwards and self.waiting < most:
            shard = min(forwards, key=lambda one: (behind(one), forwards[one], one))
            del forwards[shard]
            self.waiting += 1
            return UnitHalf(Half.FORWARD, shard)
        return None


def order(assigned: Assigned, done: Sequence[Collection[int]] = ()) -> Order:
    """The order in which all ranks compute their units.

    No rank waits for ever: the last stage ends each unit that it begins, and so does each stage whose next one does.

    Args:
        done: by stage, the shards whose units are computed already: their ranks have kept what crosses the boundaries. (): none is.

    Raises:
        ValueError: the stages do not have the same shards.
    """
    done = done or [()] * len(assigned)
    stages = [sorted([*done[stage], *(shard for shards in column for shard in shards)]) for stage, column in enumerate(assigned)]
    if any(shards != stages[0] for shards in stages) or len(set(stages[0])) < len(stages[0]):
        raise ValueError(f"the stages of a pipeline have other shards than each other: {stages}")
    places = [{shard: place for place, shards in enumerate(column) for shard in shards} for column in assigned]
    ranks, last = [[_Rank() for _ in column] for column in assigned], len(assigned) - 1
    for stage, column in enumerate(assigned):
        for place, shards in enumerate(column):
            ready = [one for one in shards if stage == 0 or one in done[stage - 1]]
            ranks[stage][place].ready[Half.FORWARD].update(dict.fromkeys(ready, 0))
            ranks[stage][place].coming = len(ready)
            beside = [one for one in (stage - 1, stage + 1) if 0 <= one <= last]
            ranks[stage][place].ways = (
                max((len({places[one][shard] for shard in shards if shard in places[one]}) for one in beside), default=1) or 1
            )
    ended: list[tuple[int, int, int, UnitHalf]] = []  # (tick, stage, place, half)
    now = 0

    def after(stage: int, shard: int) -> _Rank | None:
        """The rank that computes the next stage of a shard; None: it is computed, or there is none."""
        place = places[stage + 1].get(shard) if stage < last else None
        return None if place is None else ranks[stage + 1][place]

    def behind(stage: int, shard: int) -> int:
        return rank.coming if (rank := after(stage, shard)) is not None else 0

    def begin(stage: int, place: int) -> None:
        rank = ranks[stage][place]
        turn = None if rank.busy else rank.next(rank.ways * (last - stage + 1), partial(behind, stage))
        if turn is None:
            return
        rank.busy = True
        rank.turns.append(turn)
        if turn.half is Half.FORWARD:
            rank.coming -= 1
            if (following := after(stage, turn.shard)) is not None:
                following.coming += 1
        heapq.heappush(ended, (now + (BACKWARD_TICKS if turn.half else FORWARD_TICKS), stage, place, turn))

    for stage, column in enumerate(assigned):
        for place in range(len(column)):
            begin(stage, place)
    while ended:
        now, touched = ended[0][0], set[tuple[int, int]]()
        while ended and ended[0][0] == now:
            _, stage, place, turn = heapq.heappop(ended)
            ranks[stage][place].busy = False
            touched.add((stage, place))
            if turn.half is Half.FORWARD and (stage == last or turn.shard in done[stage + 1]):
                to, half = stage, Half.BACKWARD
            else:
                to, half = (stage - 1 if turn.half else stage + 1), turn.half
            if to >= 0 and turn.shard in places[to]:
                ranks[to][places[to][turn.shard]].ready[half][turn.shard] = now
                touched.add((to, places[to][turn.shard]))
        for stage, place in sorted(touched):
            begin(stage, place)
    return Order(tuple(tuple(rank.turns for rank in column) for column in ranks), now)


class StageShares(NamedTuple):
    """The units of one stage in a step, by place in its column: ``done`` ones, and those that are ``assigned``. ``ranks``: of the view."""

    ranks: tuple[int, ...]
    done: tuple[frozenset[int], ...]
    assigned: tuple[tuple[int, ...], ...]

    def computing(self) -> dict[int, int]:
        """By shard, the view rank to which its unit is assigned."""
        return {shard: rank for rank, shards in zip(self.ranks, self.assigned, strict=True) for shard in shards}

    def holding(self) -> dict[int, int]:
        """By shard, the view rank that has computed its unit."""
        return {shard: rank for rank, shards in zip(self.ranks, self.done, strict=True) for shard in shards}


class Ways:
    """The ways of all shards of a step through the stages. All ranks of a view derive the same ones.

    Attributes:
        stages: their shares. ``computing``, ``holding``: of each stage.
    """

    def __init__(self, stages: Sequence[StageShares]) -> None:
        self.stages = tuple(stages)
        self.computing, self.holding = [one.computing() for one in stages], [one.holding() for one in stages]

    @cached_property
    def _order(self) -> Order:
        return order([one.assigned for one in self.stages], [frozenset[int]().union(*one.done) for one in self.stages])

    def turns(self, stage: int, place: int) -> Turns:
        """The turns of one rank."""
        return self._order.turns[stage][place]

    @cached_property
    def most(self) -> int:
        """The largest number of shards that one rank brings."""
        return max(len(done) + len(assigned) for one in self.stages for done, assigned in zip(one.done, one.assigned, strict=True))

    @cached_property
    def of_last(self) -> list[list[int]]:
        """By place of the last stage's column, the shards that the rank brings."""
        last = self.stages[-1]
        return [sorted({*done, *assigned}) for done, assigned in zip(last.done, last.assigned, strict=True)]


def ways_of(view: View, member: Member, held: Sequence[Collection[int]], shards: int, *, idle: bool) -> Ways:
    """The ways of a step that may have begun before ``view``, for ``member`` and the ranks that it exchanges with.

    Where several ranks compute a unit together, these are of each stage the ranks at the same place of their groups.

    Args:
        held: by view rank, the shards whose units it has computed; of a receiver of the state none. Of ranks that compute together, a unit
            counts that all have computed.
        idle: ranks that receive their state compute nothing.
    """
    found = []
    for number, stage in enumerate(by_stage(view.members)):
        ranks = stage[tuple((axis, number if axis == STAGE else place) for axis, place in member.coordinate)]
        together = list(zip(*stage.values(), strict=True))
        column = view.column_of(view.members[ranks[0]])
        computed = [frozenset(held[group[0]]).intersection(*(held[rank] for rank in group)) for group in together]
        shares = share(computed, column.ranges, shards, column.idle if idle else (), column.giver)
        kept = tuple(frozenset(shard for lo, hi in blocks for shard in range(lo, hi)) for blocks in shares.kept)
        found.append(StageShares(ranks, kept, shares.assigned))
    return Ways(found)
