"""The end of a run: the last record of its journal, and the release of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.machine.state import MachineState, Phase
from fleet.protocol.causes import EndWhy
from fleet.protocol.instructions import EndRun, Release
from fleet.protocol.records import RunEnded, status_of
from fleet.protocol.types import Member


def end(machine: MachineState, why: EndWhy, reason: str, detail: str, now_s: float, digest: str = "") -> None:
    """Write the last record of the journal, and release all ranks. ``reason`` and ``detail`` are for people."""
    if machine.phase == Phase.END:
        return
    machine.phase = Phase.END
    machine.ending.record = record = RunEnded(status_of(why), reason, now_s, digest, detail, why)
    machine.write(record)
    release(machine, (rank.member for rank in machine.roster.in_order()), now_s)
    machine.say(EndRun(status_of(why), reason, detail, why))


def release(machine: MachineState, members: Iterable[Member], now_s: float) -> None:
    """Release these members. Each one gets one ``Release`` within ``resend_s``, no matter how many of its messages come."""
    record, sent_s, again_s = machine.ending.record, machine.ending.released_s, machine.settings.timeouts.resend_s
    due = tuple(member for member in members if member not in sent_s or now_s - sent_s[member] >= again_s)
    if due and record is not None:
        sent_s.update(dict.fromkeys(due, now_s))
        machine.say(Release(due, record.reason))
