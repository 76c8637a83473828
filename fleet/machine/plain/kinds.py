"""Which faults may strike a job that is not Fleet's: those that need neither Fleet's agents nor Ray. Pure."""

from __future__ import annotations

from fleet.protocol.fault_kinds import TABLE, Performer, kind_of

INJECTABLE = tuple(kind.name for kind in TABLE if kind.performer in (Performer.AGENT, Performer.LAUNCHER) and not kind.whole_rack)
"""Signals to processes of this machine."""


def why_not(kind: str) -> str:
    """Why a fault of another kind does not strike."""
    performer = kind_of(kind).performer
    needed = f"{kind} is done by {performer}" if performer is not None else f"{kind} has no operation"
    return f"{needed}, and a job that is not Fleet's has none: what can strike it is {', '.join(INJECTABLE)}"
