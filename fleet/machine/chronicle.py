"""Short records of events, so that a report can tell the story of a loss: the events with consequences, each with its number.

A record or an instruction names the event that led to it. Heartbeats, and ticks without a change, leave no record. So the journal of a run
without faults is hardly longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fleet.machine.roster import RankPhase
from fleet.machine.state import MachineState
from fleet.protocol.events import Event, Formed, Joined, NodeJoined, NodeLost, NodeSilent, Quiesced, Raised
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import Instruction, Write
from fleet.protocol.records import DecisionMade, HistoryBegun, Received, RunEnded, ViewPublished
from fleet.protocol.types import Member

DECISIVE = (DecisionMade, ViewPublished, HistoryBegun, ProcessLost, RunEnded)
"""An event that leads to one of these records is journalled."""
DETAIL = 160
"""Most characters of a rank's text."""


def news(machine: MachineState, event: Event, now_s: float) -> Received | None:
    """The short record of an ``event`` that is always journalled; None for a repeated event. Call it before the event is handled."""
    number = machine.output.event
    match event:
        case Quiesced(member=member, generation=generation):
            rank = machine.current(member)
            if rank is not None and rank.may_be_in(generation):
                step = event.state.step if event.state is not None else -1
                words = f"{event.why}: {event.detail}" if event.detail else str(event.why)
                return Received(number, "Quiesced", now_s, member, rank.process.node, generation, step, words[:DETAIL])
        case Formed(member=member, generation=generation, state=state):
            rank = machine.current(member)
            if rank is not None and rank.may_be_in(generation) and (rank.generation, rank.phase) != (generation, RankPhase.JOINED):
                return Received(number, "Formed", now_s, member, rank.process.node, generation, state.step)
        case ProcessLost(member=member) | Raised(member=member) if (rank := machine.current(member)) is not None:
            said = event.error[:DETAIL] if isinstance(event, Raised) else ""
            return Received(number, type(event).__name__, now_s, member, rank.process.node, rank.generation, event.step, said)
        case NodeSilent(node=node) | NodeLost(node=node):
            return Received(number, type(event).__name__, now_s, None, node)
    return None


def recorded(event: Event, number: int, received: Received | None, out: Sequence[Instruction], now_s: float) -> list[Instruction]:
    """``out``, with the number of its event in each, behind the record of the event if that is journalled."""
    if received is None and any(isinstance(each, Write) and isinstance(each.record, DECISIVE) for each in out):
        received = Received(number, type(event).__name__, now_s, _member(event), event.node if isinstance(event, NodeJoined) else "")
    numbered = [_numbered(each, number) for each in out]
    return numbered if received is None else [Write(received), *numbered]


def _member(event: Event) -> Member | None:
    """The sender of an event. A process that says hello has no name yet."""
    return None if isinstance(event, Joined) else getattr(event, "member", None)


def _numbered(instruction: Any, number: int) -> Any:
    if not isinstance(instruction, Write):
        return replace(instruction, event=number)
    record: Any = instruction.record
    return Write(replace(record, event=number)) if hasattr(record, "event") else instruction
