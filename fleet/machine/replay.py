"""Rebuilds a ``FleetMachine`` from its journal, for a restarted coordinator and for a run in a new cluster."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.machine import coordinates, ending, nodes
from fleet.machine.corruption import replay
from fleet.machine.losses import Losses
from fleet.machine.roster import Rank
from fleet.machine.settings import configure
from fleet.machine.state import MachineState, Phase, Stop
from fleet.machine.stopping import give_time
from fleet.protocol.causes import ClusterEnded
from fleet.protocol.decisions import Called, Concluded, GoneBack, Lacking, LoopEnded, Notice, OfView, SettingTo, Stopping
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
from fleet.protocol.types import StateId

FORGOTTEN = 100
"""The number of views that may be missing at a journal's end, which was lost with its disk. The machine skips their numbers, even where no
rank reports them: a silent rank may be in such a view."""


def rebuild(machine: MachineState, records: Iterable[Record], now_s: float) -> float:
    """Bring a new machine to the end of the journal. The journal does not have the ranks' states: ranks report them when they connect.

    Returns the time of the last record.
    """
    last_s = now_s
    for record in records:
        machine.output.event = max(machine.output.event, getattr(record, "event", 0))
        if isinstance(record, Resumed) and record.gap:
            machine.uptime.down_s += max(0.0, record.at_s - last_s)
        last_s = getattr(record, "at_s", last_s)
        _apply(machine, record)
    machine.assembly.since_s = now_s
    machine.assembly.generation += FORGOTTEN
    for rank in machine.roster.by_slot.values():
        rank.beat_s = rank.progress_s = now_s
        rank.reported = False
    if machine.phase not in (Phase.CONCLUDE, Phase.END):
        machine.phase = Phase.RUN if machine.view is not None else Phase.GATHER
    if machine.ending.stopping is not None:
        give_time(machine, machine.ending.stopping, now_s)
    machine.checkpoints.restarted(now_s)
    return last_s


def _apply(machine: MachineState, record: Record) -> None:
    machine.note(record)
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
            machine.assembly.history = max(machine.assembly.history, history)
            machine.once.roll_back(start)
            machine.ending.roll_back(start, history)
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
        case DecisionMade(reason=reason, payload=LoopEnded() as where):
            ending.end_again(machine, where, reason)
        case DecisionMade(reason=reason, payload=Stopping(why=why)):
            machine.ending.stopping = Stop(why, reason)
        case DecisionMade(payload=SettingTo(key=key, value=value)):
            configure(machine, key, value)
        case DecisionMade(payload=Lacking() as lacking):
            machine.assembly.lacking = lacking
        case DecisionMade(payload=Called() as called):
            coordinates.replay(machine, called)
        case DecisionMade(payload=Notice() as notice):
            nodes.replay(machine, notice)
        case DecisionMade(policy="corruption"):
            replay(machine, record)
        case DecisionMade():
            machine.stragglers.replay(record)
            machine.progress.replay(record)
            machine.checkpoints.replay(record)
        case DataRead():
            machine.trained.note_data(record)
        case RunBuilt(build=build):
            machine.trained.note_build(build)
        case DataFiles():
            machine.trained.note_files(record)
        case RunStarted(at_s=at_s):
            machine.uptime.started_s = at_s
        case Resumed(gap=gap):
            machine.assembly.generation += FORGOTTEN
            machine.trained.compared = machine.trained.compared and not gap
        case RunEnded():
            machine.phase, machine.ending.record = Phase.END, record
        case _:
            machine.checkpoints.replay(record)


def _apply_view(machine: MachineState, record: ViewPublished) -> None:
    view = record.view
    machine.assembly.generation = max(machine.assembly.generation, view.generation)
    machine.assembly.history = max(machine.assembly.history, view.state.history)
    if record.graceful:
        machine.growth.proposal = view
    else:
        machine.enter(view)
        machine.phase = Phase.RUN
    for member in view.members:
        machine.roster.sent(member, view.generation)


def _settle_proposal(machine: MachineState, entered: bool, generation: int) -> None:
    proposal = machine.growth.proposal
    if proposal is None or proposal.generation != generation:
        return
    machine.growth.proposal = None
    if entered:
        machine.enter(proposal)


def move(machine: MachineState, records: Iterable[Record], now_s: float) -> list[ProcessLost]:
    """Bring a new machine to the end of another cluster's journal. All ranks are gone. Returns the records of their losses."""
    last_s = rebuild(machine, records, now_s)  # it counts earlier gaps, so it runs before the newest gap is added
    machine.uptime.down_s += max(0.0, now_s - last_s)
    machine.phase, machine.ending.record, machine.ending.stopping = Phase.GATHER, None, None
    machine.enter(None)
    machine.checkpoints.moved(now_s)
    gone = []
    for rank in machine.roster.in_order():
        machine.roster.remove(rank)
        gone.append(machine.losses.lost(rank, ClusterEnded(), now_s, -1, machine.committed.step, ""))
    machine.losses = Losses()
    return gone


def has_gone_back(records: Iterable[Record], back: GoneBack) -> bool:
    """Whether the run has already gone back for this request, and the process that resumes it was only started again."""
    payloads = [record.payload for record in records if isinstance(record, DecisionMade)]
    return any(isinstance(payload, GoneBack) and payload.asked == back.asked for payload in payloads)


def go_back(machine: MachineState, back: GoneBack, now_s: float) -> None:
    """Withdraw newer checkpoints, so that the next history begins from the wanted one. The user wants that; it is no failure."""
    state, newest = StateId(back.history, back.step), max(machine.checkpoints.kept, default=None)
    left = f", without the samples of {', '.join(back.left_out)}" if back.left_out else ""
    reason = f"its user has it go back to step {back.step}{left}"
    if newest is not None and newest > state:
        machine.say(*machine.checkpoints.withdraw(StateId(state.history, state.step + 1), newest, now_s, reason))
    machine.decide("data", "go_back", reason, back, now_s)
