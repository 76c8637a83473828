"""Whether the state of a run that goes on contradicts itself: looked at now and then, for a bounded share of the time. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fleet.machine.state import Contradiction, MachineState

SHARE = 0.01
"""Of the coordinator's time, at most: a look takes the longer the more ranks there are."""
LEAST_S = 1.0
LINE, MOST = 4_000, 1 << 20
"""So many characters of one attribute, and of all."""
WAY_OUT = "This is a mistake in Fleet, not in the script: report it with the journal. The run goes on with fleet run --resume"


class StateAudit:
    """When the state is looked at, and what was found."""

    def __init__(self, now_s: float) -> None:
        self._again_s = now_s

    def due(self, now_s: float) -> bool:
        return now_s >= self._again_s

    def done(self, now_s: float, took_s: float) -> None:
        """The look at ``now_s`` took so long."""
        self._again_s = now_s + max(LEAST_S, took_s / SHARE)

    def wait(self, until_s: float) -> None:
        """The run was told to stop for what was found: nothing is due until then."""
        self._again_s = until_s


def found_in(state: MachineState) -> str:
    """What contradicts itself, in words; empty when all is well."""
    try:
        state.validate()
    except Contradiction as wrong:
        return str(wrong)
    return ""


def reason(found: str, where: str) -> str:
    """Why the run ends. ``where``: the file that has the whole state, "" where it could not be kept."""
    return f"the coordinator contradicts itself {found}{f'; its state is in {where}' if where else ''}. {WAY_OUT}"


def in_text(state: MachineState) -> str:
    """All that it knows, an attribute or a rank a line."""
    known = [f"{name} = {value!r}"[:LINE] for name, value in _attributes(state)]
    known += [f"{rank!r}"[:LINE] for rank in state.roster.in_order()]
    return "\n".join(known)[:MOST] + "\n"


def _attributes(whole: Any, within: str = "") -> Iterator[tuple[str, object]]:
    """Name and value of each attribute, and of those of the parts that it is made of."""
    for field in dataclasses.fields(whole):
        name, value = f"{within}{field.name}", getattr(whole, field.name)
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith(f"{__package__}."):
            yield from _attributes(value, f"{name}.")
        else:
            yield name, value
