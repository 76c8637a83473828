"""The groups of ranks in one view."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from actors.rank.membership.process_group import Group
from fleet.protocol.chunks import ViewState
from fleet.protocol.types import View


class ViewGroups(NamedTuple):
    """The groups that one rank is in.

    Attributes:
        whole: all ranks of the view.
        column: those of this rank's column, whose shards are summed together. Without a mesh that is the whole.
        together: those with which this rank computes shards; None where it computes alone.
    """

    whole: Group
    column: Group
    together: Group | None = None


Meeting = Callable[[ViewGroups, View], ViewState]
"""Brings the members of a view to one state, where no rank has all of it."""
