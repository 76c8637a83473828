"""The table of the decision core: each event with its handler and its possible results. ``docs/protocol.md`` prints it.

After most events the state is compared with the goal, see ``core.py``. ``RECONCILES`` has the possible results of that, by phase. The
simulator checks that a run has no other results. Any event may lead to ``Received``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from fleet.machine import building, leaving, nodes, notes, ranks, settings, stopping, ticks, views
from fleet.machine.state import MachineState, Phase
from fleet.protocol import events as e
from fleet.protocol import instructions as i
from fleet.protocol import records as r


class Of(StrEnum):
    """The senders whose event counts: any sender, a live member, or a live member of the view. Events of others are dropped."""

    ANYBODY = "anybody"
    LIVE = "live"
    IN_VIEW = "in view"


class EventRow(NamedTuple):
    """The handling of an event.

    Attributes:
        do: the handler.
        emits: records and instructions that the handler may give.
        of: the senders that count.
        reconciles: the state is compared with the goal afterwards.
        recorded: the journal has the event, with or without results.
    """

    do: Callable[[MachineState, Any, float], None]
    emits: tuple[type, ...] = ()
    of: Of = Of.ANYBODY
    reconciles: bool = True
    recorded: bool = False


OVER = (r.RunEnded, i.Release, i.EndRun)
"""The run ends."""
LOSS = (r.ProcessLost, r.DecisionMade, r.CheckpointRecord, i.Quiesce, i.Inspect, i.Evict, i.Cancel, *OVER)
"""A rank is lost, or all are called out of the view. Other ranks may then be given up, and the run may end."""

OF_RANKS: dict[type, EventRow] = {
    e.Joined: EventRow(ranks.joined, (r.ProcessUp, i.Welcome, i.Fence, *LOSS)),
    e.RunBuilt: EventRow(building.received, (r.RunBuilt, r.DecisionMade, *OVER), Of.LIVE),
    e.Ready: EventRow(ranks.ready, of=Of.LIVE),
    e.Formed: EventRow(views.formed, LOSS, Of.LIVE, recorded=True),
    e.Quiesced: EventRow(leaving.quiesced, LOSS, Of.LIVE, recorded=True),
    e.Finished: EventRow(ranks.finished, (*LOSS, i.Conclude), Of.LIVE),
    e.Left: EventRow(ranks.finished, (*LOSS, i.Conclude), Of.LIVE),
    e.Raised: EventRow(leaving.raised, LOSS, Of.LIVE, recorded=True),
    e.PartWritten: EventRow(notes.part_written, (i.CommitCheckpoint,), Of.IN_VIEW),
    e.PartFailed: EventRow(notes.part_failed, (r.CheckpointRecord,), Of.IN_VIEW),
    e.OnceWanted: EventRow(notes.once_wanted, (r.OnceRecord, i.OnceAnswer), Of.LIVE),
    e.OnceDone: EventRow(notes.once_done, (r.OnceRecord, i.OnceAnswer), Of.LIVE),
    e.Implausible: EventRow(notes.implausible, (r.DecisionMade,)),
    e.Measurement: EventRow(notes.keep, (r.Measurement,), Of.LIVE, reconciles=False),
    e.Logged: EventRow(notes.logged, (r.Measurement,), Of.LIVE, reconciles=False),
    e.Usage: EventRow(notes.keep, (r.Usage,), Of.LIVE, reconciles=False),
    e.DataRead: EventRow(notes.data_read, (r.DataRead,), Of.LIVE, reconciles=False),
    e.DataFiles: EventRow(notes.data_files, (r.DataFiles,), Of.LIVE, reconciles=False),
    e.OutputDropped: EventRow(notes.output_dropped, (r.DecisionMade,), Of.LIVE),
}
"""Events of ranks, by way of their agent."""

OF_AGENTS: dict[type, EventRow] = {
    e.Heartbeat: EventRow(leaving.heartbeat, (i.Evict,), reconciles=False),
    e.ProcessLost: EventRow(leaving.lost, LOSS, recorded=True),
    e.LossExplained: EventRow(leaving.explained, (r.LossExplained,)),
    e.StepsTimed: EventRow(notes.steps_timed, reconciles=False),
    e.CopiesHeld: EventRow(notes.copies_held, LOSS),
    e.RefusedLines: EventRow(notes.keep, (r.RefusedLines,), reconciles=False),
}
"""Events of agents, for their node."""

OF_THE_RUN: dict[type, EventRow] = {
    e.Tick: EventRow(ticks.tick, (*LOSS, r.Committed, i.Welcome)),
    e.NodeJoined: EventRow(nodes.joined, (r.DecisionMade,)),
    e.NodeSilent: EventRow(leaving.hung_up, LOSS, recorded=True),
    e.NodeLost: EventRow(leaving.given_up, LOSS, recorded=True),
    e.NodeLeaves: EventRow(nodes.announced, (r.DecisionMade,)),
    e.NodeStays: EventRow(nodes.withdrawn, (r.DecisionMade,)),
    e.CheckpointDurable: EventRow(notes.durable, (r.CheckpointRecord,)),
    e.CheckpointFailed: EventRow(notes.failed, (r.CheckpointRecord,)),
    e.EvidenceKept: EventRow(notes.keep, (r.EvidenceKept,)),
    e.FaultRecord: EventRow(leaving.injected, (r.FaultRecord,)),
    e.FloorReached: EventRow(notes.floor_reached, (r.DecisionMade,)),
    e.RoomMissing: EventRow(notes.room_missing, (r.DecisionMade,)),
    e.NodesWanted: EventRow(notes.nodes_wanted, (r.DecisionMade,)),
    e.SettingChanged: EventRow(settings.on_setting, (r.DecisionMade,)),
    e.StopRequested: EventRow(stopping.stop, (r.DecisionMade, i.Quiesce, *OVER)),
}
"""Events of the coordinator itself, of its driver, and of the injector."""

TABLE = OF_RANKS | OF_AGENTS | OF_THE_RUN

_RUNS = (*LOSS, r.Committed, r.ViewPublished, i.Propose, i.SaveCheckpoint, i.Halt, i.EndAt, i.Conclude)
RECONCILES: dict[Phase, tuple[type, ...]] = {
    Phase.GATHER: (*LOSS, r.HistoryBegun, r.ViewPublished, i.Publish),
    Phase.FORM: (*_RUNS, i.Publish),
    Phase.RUN: _RUNS,
    Phase.CONCLUDE: LOSS,
    Phase.END: (i.Welcome, i.Release, i.Evict),
}
"""Possible results of the comparison with the goal. At the end there is no comparison: late comers are released."""
STOPS = (*LOSS, r.Committed, i.Keep)
"""The same in any phase, for a run that is told to stop."""


def allowed(event: type, before: Phase, after: Phase, stops: bool) -> frozenset[type]:
    """All possible results of an event from phase ``before`` to phase ``after``. Most events may call all ranks out."""
    if before == Phase.END:
        return frozenset(RECONCILES[before])
    row = TABLE[event]
    compared = (*RECONCILES[before], *RECONCILES[Phase.GATHER], *RECONCILES[after], *(STOPS if stops else ())) if row.reconciles else ()
    return frozenset((*row.emits, *compared))
