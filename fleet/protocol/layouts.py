"""The ways in which a state may lie on the ranks of a run, in one table. A new layout is a module with a class, and a row here."""

from __future__ import annotations

from typing import NamedTuple


class LayoutKind(NamedTuple):
    """One layout.

    Attributes:
        name: the value of ``optimizer_sharding``.
        where: ``module:class`` of the layout in a rank.
        spread: the part of the state that is sharded over the ranks; empty where each rank has the whole state.
        meaning: in words, for the user.
    """

    name: str
    where: str
    spread: str
    meaning: str


KINDS = (
    LayoutKind("none", "actors.rank.step.layout:StateLayout", "", "each rank keeps all of the state"),
    LayoutKind("zero1", "actors.rank.zero1.layout:Zero1Layout", "optimizer's state", "each rank keeps a part of the optimizer's state"),
    LayoutKind("fsdp", "actors.rank.fsdp.layout:FsdpLayout", "parameters", "and a part of the parameters too"),
)
LAYOUTS = {kind.name: kind for kind in KINDS}
