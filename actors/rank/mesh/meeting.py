"""How the members of a view come to one state, where ranks compute together.

In each column a rank that has the state gives it to those that lack it, beside the first step.

A rank that had agreed to a step, and left before it took it, takes it now if others have taken it. See :mod:`fleet.protocol.chunks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from actors.rank.membership.process_group import GroupBroken
from actors.rank.membership.view_groups import ViewGroups
from actors.rank.mesh.layout import ColumnLayout
from actors.rank.step.train_step import TrainStep
from actors.rank.zero1.resharding import come_to_one
from fleet.protocol.chunks import WHOLE, ViewState, state_in_column
from fleet.protocol.member import MemberProtocol
from fleet.protocol.types import View


class ColumnMeeting:
    """One rank's part.

    Args:
        advance: takes the step that the others have taken, from this rank's sums, and reports it.
    """

    def __init__(self, train: TrainStep, protocol: MemberProtocol, advance: Callable[[], None]) -> None:
        self._train, self._protocol, self._advance = train, protocol, advance

    def exchange(self, groups: ViewGroups, view: View) -> ViewState:
        """Meet in ``view``.

        Raises GroupBroken: each rank is as before, or a step further. If a column has no rank with the state, all ranks find and report it.
        """
        whole, vote = groups.whole, self._train.vote
        at = None if self._protocol.dirty else self._protocol.state
        mine = vote.claim(at, (WHOLE,), (), complete=True, node=0)
        claims, target = come_to_one(whole, mine, view.donor, vote, self._protocol, self._advance)
        met = state_in_column(claims, target, view, whole.rank)
        if met is None:
            self._protocol.incomplete()
            raise GroupBroken("no rank of a column of the view holds its state", whole.generation)
        cast(ColumnLayout, self._train.layout).kept_sums.forget()
        return met
