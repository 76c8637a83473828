"""The decision core: events in, instructions out.

``FleetMachine.handle`` has an event noted by whoever handles it, see ``table.py``, then compares what is with what should be
(``_reconcile``) and says what to do about the difference. It is level-based: a missed or doubled notice does no harm, because every tick
compares again and repeats what was not yet acknowledged. It reads no clock and does no I/O; the live coordinator and the simulator run this
same object.

The life of a view: GATHER (all who were in it report where they stand) -> FORM (a view is published, its members meet and take state
from the donor) -> RUN -> on any loss GATHER again; after the last step CONCLUDE, see ``ending.py``. ``END`` is final.

All that it knows is in ``state.py``. From "a rank is gone" to "its shards are reassigned": ``leaving.py``, ``views.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.machine import chronicle, ending, nodes, proposals, remedies, replay, stopping, views
from fleet.machine.budget import BudgetWatch
from fleet.machine.doubts import Doubts
from fleet.machine.end import end
from fleet.machine.figures import ShardFigures
from fleet.machine.progress import ProgressLimit
from fleet.machine.roster import Roster
from fleet.machine.state import Assembly, Growth, MachineState, Phase, RunPolicies, Trained, Uptime
from fleet.machine.stragglers import Stragglers
from fleet.machine.table import TABLE, EventRow, Of
from fleet.machine.tiers import FaultRates, Tiers
from fleet.protocol.decisions import Decision, GoneBack
from fleet.protocol.events import Event, Tick
from fleet.protocol.instructions import Instruction, Write
from fleet.protocol.ports import CorruptionPolicy, IntervalPolicy, PlacementPolicy, ProgressPolicy, RecoveryPolicy, StragglerPolicy
from fleet.protocol.records import Record
from fleet.protocol.types import Build, StateId
from fleet.settings.run import RunSettings


class FleetMachine:
    """Decides membership, views, checkpoints and the end of one run.

    Args:
        settings: the run's settings.
        recovery, placement, interval, straggler, progress, corruption: pure policies. Without a straggler policy slow ranks are borne;
            without one for progress that time-out is fixed; without one for corruption, ranks that differ end the run.
        lemons: why nodes stay out for what they did in earlier runs, by their index.
        checkpoint: id and state of the newest durable checkpoint, when the run resumes one.
        build: how another run was built, from whose checkpoint this one goes on.
        peers: interval of copies in the memory of other nodes; None: none are made.
        rates: how often faults need a durable checkpoint, and copies in memory, by what the run has met; by default none is expected.
        now_s: when the run starts, on the run's clock.

    Attributes:
        state: everything that it knows.
    """

    def __init__(
        self,
        settings: RunSettings,
        recovery: RecoveryPolicy,
        placement: PlacementPolicy,
        interval: IntervalPolicy,
        *,
        straggler: StragglerPolicy | None = None,
        progress: ProgressPolicy | None = None,
        corruption: CorruptionPolicy | None = None,
        lemons: Mapping[int, Decision] | None = None,
        checkpoint: tuple[str, StateId] | None = None,
        build: Build | None = None,
        peers: IntervalPolicy | None = None,
        rates: FaultRates = lambda losses, exposure_s: (0.0, 0.0),
        now_s: float = 0.0,
    ) -> None:
        roster = Roster(lemons or {})
        committed, history = (checkpoint[1], checkpoint[1].history) if checkpoint else (StateId(0, 0), -1)
        self.state = MachineState(
            settings, RunPolicies(recovery, placement), Tiers(settings, roster, interval, peers, checkpoint, rates, now_s), roster,
            doubts=Doubts(corruption), stragglers=Stragglers(straggler),
            progress=ProgressLimit(progress, settings.timeouts.progress_s, now_s), committed=committed,
            assembly=Assembly(history, now_s), growth=Growth(now_s), uptime=Uptime(now_s, BudgetWatch(settings.checkpoint.keep)),
            trained=Trained(ShardFigures(settings.shards), build),
        )  # fmt: skip

    # ---- the one entry -------------------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event at ``now_s`` on the run's clock; returns what is to be done, in order."""
        machine, row = self.state, TABLE[type(event)]
        machine.output.begin()
        received = chronicle.news(machine, event, now_s) if row.recorded and machine.ending.record is None else None
        if machine.phase == Phase.END:
            ending.after_end(machine, event, now_s)
        else:
            _take(machine, event, row, now_s)
        number, out = machine.output.event, machine.output.instructions
        return chronicle.recorded(event, number, received, out, now_s) if out or received is not None else []

    # ---- after the coordinator died ------------------------------------------------------------------------------------------------------

    def replay(self, records: Iterable[Record], now_s: float) -> None:
        """Rebuild from the journal of this very run. Ranks may train meanwhile: they get ``node_s`` to report before any is given up."""
        machine = self.state
        replay.rebuild(machine, records, now_s)
        machine.liveness.grace_until_s = now_s + machine.settings.timeouts.node_s if machine.phase != Phase.END else None

    def resume(self, records: Sequence[Record], now_s: float, back: GoneBack | None = None) -> list[Instruction]:
        """Go on in a new cluster, from the journal of a run whose ranks are all gone, up to ``Resumed``; returns what is to be written
        first. ``back``: to which checkpoint its user has it go back; without, it goes on from the newest."""
        machine = self.state
        machine.output.instructions = [Write(record) for record in replay.move(machine, records, now_s)]
        if back is not None and not replay.has_gone_back(records, back):
            replay.go_back(machine, back, now_s)
        else:
            machine.say(*machine.checkpoints.step_back(now_s))
        machine.assembly.deadline_s = now_s
        return machine.output.instructions


# ---- what an event says ------------------------------------------------------------------------------------------------------------------


def _take(machine: MachineState, event: Event, row: EventRow, now_s: float) -> None:
    outstanding = bool(machine.roster.outstanding)
    if _counts(machine, event, row.of):
        row.do(machine, event, now_s)
    if row.reconciles and machine.ending.record is None:
        # Policies look at all ranks: they are asked at ticks, and when the last rank has answered, not for each word of each rank.
        _reconcile(machine, now_s, isinstance(event, Tick) or (outstanding and not machine.roster.outstanding))


def _counts(machine: MachineState, event: Any, of: Of) -> bool:
    if of is Of.ANYBODY:
        return True
    lives = event.member is not None and machine.current(event.member) is not None
    return lives and (of is Of.LIVE or event.member in machine.attendance.members)


# ---- what should be ----------------------------------------------------------------------------------------------------------------------


def _reconcile(machine: MachineState, now_s: float, ask: bool) -> None:
    """Do something about the difference between what is and what should be; ``ask`` the policies too."""
    stop = machine.ending.stopping
    if machine.phase in (Phase.FORM, Phase.RUN):
        ending.say_where(machine, now_s)
    if stop is not None and stopping.is_over(machine, stop, now_s):
        end(machine, stop.why, stop.reason, "", now_s)
    elif machine.liveness.grace_until_s is not None or (stop is not None and stopping.takes(machine, stop, now_s)):
        return
    elif machine.phase == Phase.GATHER:
        views.try_form(machine, now_s, ask)
    elif machine.phase == Phase.FORM:
        if views.watch_forming(machine, now_s):
            _while_running(machine, now_s, ask=False)
    elif machine.phase == Phase.RUN:
        _while_running(machine, now_s, ask)
    elif machine.phase == Phase.CONCLUDE:
        ending.watch(machine, now_s)


def _while_running(machine: MachineState, now_s: float, ask: bool) -> None:
    view = machine.view
    assert view is not None
    if machine.attendance.all_finished():
        ending.complete(machine, now_s)
    elif machine.attendance.finished:
        return
    elif machine.ending.stopping is not None:
        stopping.halt(machine, now_s)
        return
    elif machine.growth.proposal is not None:
        proposals.watch(machine, now_s)
    elif ask and proposals.try_grow(machine, now_s):
        return
    if ask:
        nodes.tick(machine, view, now_s)
        proposals.shrink(machine, view, now_s)
    if ask and machine.phase == Phase.RUN and machine.growth.proposal is None:
        machine.say(*machine.checkpoints.tick(view, now_s))
        machine.say(*machine.progress.tick(machine.stragglers.steps_s, now_s))
        remedies.tick(machine, now_s)
