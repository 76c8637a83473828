"""The decision core: events in, instructions out.

``FleetMachine.handle`` calls the event's handler of ``table.py``, which notes the event. Then it compares the state with the goal
(``_reconcile``), and gives the instructions against the difference. A missed or doubled message does no harm: every tick compares again,
and repeats instructions that were not acknowledged. The machine reads no clock and does no I/O. The live coordinator and the simulator run
this same object.

The life of a view begins with GATHER: all its ranks report their states. Then comes FORM: a view is published, and its members meet and
take state from the donor. Then comes RUN. A loss leads to GATHER again. After the last step comes CONCLUDE, see ``ending.py``. END is
final.

``state.py`` has the whole state. ``leaving.py`` and ``views.py`` lead from "a rank is gone" to "its shards are reassigned".
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
        recovery, placement, interval, straggler, progress, corruption: pure policies. Without a straggler policy, slow ranks stay. Without
            a progress policy, that time-out is fixed. Without a corruption policy, ranks that differ end the run.
        lemons: by index of a node, the decision to keep it out for its faults in earlier runs.
        checkpoint: id and state of the newest durable checkpoint, when the run resumes one.
        build: the build of another run, if this run goes on from its checkpoint.
        peers: interval of copies in the memory of other nodes; None: no copies.
        rates: rates of faults that need a durable checkpoint, and copies in memory, by the run's losses; by default none is expected.
        now_s: when the run starts, on the run's clock.

    Attributes:
        state: the whole state of the machine.
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
        """Take one event at ``now_s`` on the run's clock; returns the instructions, in order."""
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
        """Rebuild from this run's own journal. Ranks may train meanwhile: they get ``node_s`` to report before any is given up."""
        machine = self.state
        replay.rebuild(machine, records, now_s)
        machine.liveness.grace_until_s = now_s + machine.settings.timeouts.node_s if machine.phase != Phase.END else None

    def resume(self, records: Sequence[Record], now_s: float, back: GoneBack | None = None) -> list[Instruction]:
        """Go on in a new cluster, from the journal of a run whose ranks are all gone, up to ``Resumed``. Returns the first records to
        write. ``back``: the checkpoint to which the user goes back; without it, the run goes on from the newest."""
        machine = self.state
        machine.output.instructions = [Write(record) for record in replay.move(machine, records, now_s)]
        if back is not None and not replay.has_gone_back(records, back):
            replay.go_back(machine, back, now_s)
        else:
            machine.say(*machine.checkpoints.step_back(now_s))
        machine.assembly.deadline_s = now_s
        return machine.output.instructions


# ---- events ------------------------------------------------------------------------------------------------------------------------------


def _take(machine: MachineState, event: Event, row: EventRow, now_s: float) -> None:
    outstanding = bool(machine.roster.outstanding)
    if _counts(machine, event, row.of):
        row.do(machine, event, now_s)
    if row.reconciles and machine.ending.record is None:
        # Policies look at all ranks: they are asked at ticks, and when the last rank has answered, but not for each event of each rank.
        _reconcile(machine, now_s, isinstance(event, Tick) or (outstanding and not machine.roster.outstanding))


def _counts(machine: MachineState, event: Any, of: Of) -> bool:
    if of is Of.ANYBODY:
        return True
    lives = event.member is not None and machine.current(event.member) is not None
    return lives and (of is Of.LIVE or event.member in machine.attendance.members)


# ---- the goal ----------------------------------------------------------------------------------------------------------------------------


def _reconcile(machine: MachineState, now_s: float, ask: bool) -> None:
    """Act on the difference between the state and the goal; ``ask`` the policies, too."""
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
    elif ask and proposals.try_change(machine, now_s):
        return
    if ask:
        nodes.tick(machine, view, now_s)
    if ask and machine.phase == Phase.RUN and machine.growth.proposal is None:
        machine.say(*machine.checkpoints.tick(view, now_s))
        machine.say(*machine.progress.tick(machine.stragglers.steps_s, now_s))
        remedies.tick(machine, now_s)
