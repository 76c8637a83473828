"""Checks now and then, for a bounded share of the time, that the state of a running run does not contradict itself. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fleet.machine.state import Contradiction, MachineState

SHARE = 0.01
"""Largest share of the coordinator's time: a check takes longer with more ranks."""
LEAST_S = 1.0
LINE, MOST = 4_000, 1 << 20
"""Most characters of one attribute, and of the whole text."""
WAY_OUT = "This is a mistake in Fleet, not in the script: report it with the journal. The run goes on with fleet run --resume"


class StateAudit:
    """When the next check is due."""

    def __init__(self, now_s: float) -> None:
        self._again_s = now_s

    def due(self, now_s: float) -> bool:
        return now_s >= self._again_s

    def done(self, now_s: float, took_s: float) -> None:
        """The check at ``now_s`` took ``took_s``."""
        self._again_s = now_s + max(LEAST_S, took_s / SHARE)

    def wait(self, until_s: float) -> None:
        """A contradiction has stopped the run: no check is due until ``until_s``."""
        self._again_s = until_s


def found_in(state: MachineState) -> str:
    """The contradiction in words; empty when there is none."""
    try:
        state.validate()
    except Contradiction as wrong:
        return str(wrong)
    return ""


def reason(found: str, where: str) -> str:
    """The reason for the end of the run. ``where``: the file with the whole state, "" where it could not be written."""
    return f"the coordinator contradicts itself {found}{f'; its state is in {where}' if where else ''}. {WAY_OUT}"


def in_text(state: MachineState) -> str:
    """The whole state, with one attribute or one rank a line."""
    known = [f"{name} = {value!r}"[:LINE] for name, value in _attributes(state)]
    known += [f"{rank!r}"[:LINE] for rank in state.roster.in_order()]
    return "\n".join(known)[:MOST] + "\n"


def _attributes(whole: Any, within: str = "") -> Iterator[tuple[str, object]]:
    """Name and value of each attribute, and of the attributes of its parts."""
    for field in dataclasses.fields(whole):
        name, value = f"{within}{field.name}", getattr(whole, field.name)
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith(f"{__package__}."):
            yield from _attributes(value, f"{name}.")
        else:
            yield name, value
