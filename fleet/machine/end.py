"""The last word of a run: the last record of its journal, and the release of everybody."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import EndWhy
from fleet.protocol.instructions import EndRun, Release
from fleet.protocol.records import RunEnded, status_of
from fleet.protocol.types import Member


def end(machine: MachineState, why: EndWhy, reason: str, detail: str, now_s: float, digest: str = "") -> None:
    """The last record of the journal, and the word to everybody. ``reason`` and ``detail`` are for people."""
    if machine.phase == Phase.END:
        return
    machine.phase = Phase.END
    machine.ended = RunEnded(status_of(why), reason, now_s, digest, detail, why)
    machine.write(machine.ended)
    release(machine, (rank.member for rank in machine.roster.in_order()))
    machine.say(EndRun(status_of(why), reason, detail, why))


def release(machine: MachineState, members: Iterable[Member]) -> None:
    """The run is over for these."""
    members = tuple(members)
    if members and machine.ended is not None:
        machine.say(Release(members, machine.ended.reason))
