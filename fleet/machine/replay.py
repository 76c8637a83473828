"""Rebuilding a ``FleetMachine`` from its journal, and finding out after a restart who is still there."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.machine import departures, ending
from fleet.machine.corruption import replay
from fleet.machine.losses import Losses
from fleet.machine.roster import Rank
from fleet.machine.settings import configure
from fleet.machine.state import MachineState, Phase, Stop
from fleet.machine.stopping import give_time
from fleet.protocol.causes import ClusterEnded
from fleet.protocol.decisions import Concluded, Lacking, Notice, OfView, SettingTo, Stopping
from fleet.protocol.records import (
    Committed,
    DataFiles,
    DataRead,
    DecisionMade,
    FaultRecord,
    HistoryBegun,
    OnceRecord,
    ProcessLost,
    ProcessUp,
    Record,
    Resumed,
    RunBuilt,
    RunEnded,
    RunStarted,
    ViewPublished,
)

FORGOTTEN = 100
"""How many views a journal's end may have held that was lost with its disk. Their numbers are skipped, whether or not ranks report them: a
rank that is silent for now may be in one."""


def rebuild(machine: MachineState, records: Iterable[Record], now_s: float) -> float:
    """Bring a new machine to where the journal ends. What ranks hold is not in there: they say so when they connect.

    Returns when the last record was written.
    """
    last_s = now_s
    for record in records:
        machine.event = max(machine.event, getattr(record, "event", 0))
        if isinstance(record, Resumed) and record.gap:
            machine.down_s += max(0.0, record.at_s - last_s)
        last_s = getattr(record, "at_s", last_s)
        _apply(machine, record)
    machine.since_s = now_s
    machine.generation += FORGOTTEN
    for rank in machine.roster.by_slot.values():
        rank.beat_s = rank.progress_s = now_s
        rank.reported = False
    if machine.phase not in (Phase.CONCLUDE, Phase.END):
        machine.phase = Phase.RUN if machine.view is not None else Phase.GATHER
    if machine.stopping is not None:
        give_time(machine, machine.stopping, now_s)
    machine.checkpoints.restarted(now_s)
    return last_s


def _apply(machine: MachineState, record: Record) -> None:
    machine.budget.note(record)
    machine.checkpoints.sessions.note(record)
    match record:
        case ProcessUp(member=member, process=process, token=token):
            machine.roster.grant(member.slot, member.incarnation)
            machine.roster.add(Rank(member, process, token, "", record.at_s))
        case ProcessLost(member=member):
            rank = machine.current(member)
            if rank is not None:
                machine.roster.remove(rank)
                machine.losses.replay_loss(record, rank, machine.committed.step)
        case ViewPublished():
            _apply_view(machine, record)
            machine.checkpoints.replay(record)
        case HistoryBegun(history=history, from_state=start):
            machine.history = max(machine.history, history)
            machine.once.roll_back(start)
        case OnceRecord():
            machine.once.replay(record)
        case Committed(state=state):
            machine.committed = max(machine.committed, state)
        case FaultRecord():
            machine.losses.aimed(record, record.members)
        case DecisionMade(action="enter" | "cancel" as action, payload=OfView(generation=generation)):
            _settle_proposal(machine, action == "enter", generation)
        case DecisionMade(reason=reason, payload=Concluded(kept=kept)):
            ending.take_up(machine, reason, kept, record.at_s)
        case DecisionMade(reason=reason, payload=Stopping(why=why)):
            machine.stopping = Stop(why, reason)
        case DecisionMade(payload=SettingTo(key=key, value=value)):
            configure(machine, key, value)
        case DecisionMade(payload=Lacking() as lacking):
            machine.lacking = lacking
        case DecisionMade(payload=Notice() as notice):
            departures.replay(machine, notice)
        case DecisionMade(policy="corruption"):
            replay(machine, record)
        case DecisionMade():
            machine.stragglers.replay(record)
            machine.progress.replay(record)
            machine.checkpoints.replay(record)
        case DataRead():
            machine.data = record
        case RunBuilt(build=build):
            machine.build, machine.compared = build, True
        case DataFiles(data_sha256=data, first=first, files=files):
            machine.files[data, first] = all(file.digest for file in files)
        case RunStarted(at_s=at_s):
            machine.started_s = at_s
        case Resumed(gap=gap):
            machine.generation += FORGOTTEN
            machine.compared = machine.compared and not gap
        case RunEnded():
            machine.phase, machine.ended = Phase.END, record
        case _:
            machine.checkpoints.replay(record)


def _apply_view(machine: MachineState, record: ViewPublished) -> None:
    view = record.view
    machine.generation = max(machine.generation, view.generation)
    machine.history = max(machine.history, view.state.history)
    if record.graceful:
        machine.proposal = view
    else:
        machine.view, machine.proposal, machine.phase = view, None, Phase.RUN
        machine.missing = set(view.members)
    for member in view.members:
        machine.roster.sent(member, view.generation)


def _settle_proposal(machine: MachineState, entered: bool, generation: int) -> None:
    proposal = machine.proposal
    if proposal is None or proposal.generation != generation:
        return
    machine.proposal = None
    if entered:
        machine.view, machine.missing = proposal, set(proposal.members)


def move(machine: MachineState, records: Iterable[Record], now_s: float) -> list[ProcessLost]:
    """Bring a new machine to where the journal of another cluster ends; all ranks are gone. Returns what is to be written of them."""
    last_s = rebuild(machine, records, now_s)  # it counts gaps by itself: first it, then what is added to them
    machine.down_s += max(0.0, now_s - last_s)
    machine.phase, machine.ended, machine.view, machine.proposal = Phase.GATHER, None, None, None
    machine.missing, machine.finished, machine.stopping = set(), set(), None
    machine.checkpoints.moved(now_s)
    gone = []
    for rank in machine.roster.in_order():
        machine.roster.remove(rank)
        gone.append(machine.losses.lost(rank, ClusterEnded(), now_s, -1, machine.committed.step, ""))
    machine.losses = Losses()
    return gone
