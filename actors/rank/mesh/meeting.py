"""How the members of a view come to one state, where ranks compute together.

In each column a rank that has the state gives it to those that lack it.

A rank that had agreed to a step, and left before it took it, takes it now if others have taken it. See :mod:`fleet.protocol.chunks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from actors.rank.membership.process_group import GroupBroken
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.mesh.layout import ColumnLayout
from actors.rank.state.tracked import receive_state, send_state
from actors.rank.step.train_step import TrainStep
from actors.rank.zero1.resharding import come_to_one
from fleet.protocol.chunks import settled
from fleet.protocol.member import MemberProtocol
from fleet.protocol.types import StateId, View, columns


class ColumnMeeting:
    """One rank's part.

    Args:
        advance: takes the step that the others have taken, from this rank's sums, and reports it.
    """

    def __init__(self, train: TrainStep, protocol: MemberProtocol, advance: Callable[[], None]) -> None:
        self._train, self._protocol, self._advance = train, protocol, advance

    def exchange(self, groups: ViewGroups, view: View) -> StateId:
        """Meet in ``view``. Gives the state that all ranks then hold.

        Raises GroupBroken: each rank is as before, or a step further. If a column has no rank with the state, all ranks find and report it.
        """
        layout, whole, me = cast(ColumnLayout, self._train.layout), groups.whole, groups.whole.rank
        claims, target = come_to_one(whole, layout.claim(), view.donor, self._train.vote, self._protocol, self._advance)
        there = settled(claims, target)
        held = list(columns(view.members).values())
        if not all(any(there[rank].state is not None for rank in column) for column in held):
            self._protocol.incomplete()
            raise GroupBroken("no rank of a column of the view holds its state", whole.generation)
        column = next(column for column in held if me in column)
        lacking = [place for place, rank in enumerate(column) if there[rank].state is None]
        giver = next(place for place in range(len(column)) if place not in lacking)
        if groups.column.rank in lacking:
            self._protocol.receiving()
            self._train.reset()
            self._train.vote.begin()
            layout.lose()
            receive_state(groups.column, giver, self._train.state)
            layout.begin(target)
        elif groups.column.rank == giver:
            for place in lacking:
                send_state(groups.column, place, self._train.state)
        layout.kept_sums.forget()
        return target
