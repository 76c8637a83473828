"""The decision core: events in, instructions out.

``FleetMachine.handle`` records what an event says about the world, then compares what is with what should be (``_reconcile``) and says what
to do about the difference. It is level-based: a missed or doubled notice does no harm, because every tick compares again and repeats what
was not yet acknowledged. It reads no clock and does no I/O; the live coordinator and the simulator run this same object.

The life of a view: GATHER (all who were in it report where they stand) -> FORM (a view is published, its members meet and take state
from the donor) -> RUN -> on any loss GATHER again; after the last step CONCLUDE, see ``ending.py``. ``END`` is final.

All that it knows is in ``state.py``. From "a rank is gone" to "its shards are reassigned": ``leaving.py``, ``ranks.py``, ``views.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet.ledger import floor
from fleet.machine import (
    building,
    chronicle,
    departures,
    ending,
    evidence,
    leaving,
    nodes,
    proposals,
    ranks,
    remedies,
    replay,
    resizing,
    stopping,
    ticks,
    views,
)
from fleet.machine.budget import BudgetWatch
from fleet.machine.doubts import Doubts
from fleet.machine.end import end
from fleet.machine.figures import ShardFigures
from fleet.machine.progress import ProgressLimit
from fleet.machine.roster import Roster
from fleet.machine.settings import on_setting
from fleet.machine.state import MachineState, Phase
from fleet.machine.stragglers import Stragglers
from fleet.machine.tiers import FaultRates, Tiers
from fleet.protocol.causes import GatherWhy
from fleet.protocol.decisions import Decision, Figures, NodesAsked
from fleet.protocol.events import (
    Built,
    CopiesHeld,
    Event,
    EvidenceWritten,
    Explained,
    FaultReported,
    FilesFound,
    Finished,
    FloorReached,
    Formed,
    Heartbeat,
    Implausible,
    Joined,
    Left,
    LinesRefused,
    Logged,
    Lost,
    Measured,
    NodeJoined,
    NodeLeaves,
    NodeLost,
    NodeSilent,
    NodeStays,
    NodesWanted,
    OnceDone,
    OnceWanted,
    OutputDropped,
    Quiesced,
    Raised,
    Reads,
    Ready,
    RoomMissing,
    SettingChanged,
    StepsTimed,
    StopRequested,
    Tick,
    Used,
)
from fleet.protocol.instructions import Instruction, Write
from fleet.protocol.ports import CorruptionPolicy, IntervalPolicy, PlacementPolicy, ProgressPolicy, RecoveryPolicy, StragglerPolicy
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade, Measurement, Record, RefusedLines, Usage
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
        roster = Roster()
        committed, history = (checkpoint[1], checkpoint[1].history) if checkpoint else (StateId(0, 0), -1)
        self.state = MachineState(
            settings, recovery, placement, lemons or {}, roster=roster, committed=committed, history=history, started_s=now_s,
            checkpoints=Tiers(settings, roster, interval, peers, checkpoint, rates, now_s), doubts=Doubts(corruption),
            stragglers=Stragglers(straggler), progress=ProgressLimit(progress, settings.timeouts.progress_s, now_s),
            budget=BudgetWatch(settings.checkpoint.keep), figures=ShardFigures(settings.shards), build=build,
        )  # fmt: skip

    # ---- the one entry -------------------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event at ``now_s`` on the run's clock; returns what is to be done, in order."""
        machine = self.state
        machine.event, machine.out = machine.event + 1, []
        if isinstance(event, Heartbeat) and machine.ended is None:  # most of all events, and nothing is to be reconciled
            leaving.heartbeat(machine, event, now_s)
            return chronicle.recorded(event, machine.event, None, machine.out, now_s) if machine.out else []
        received = chronicle.news(machine, event, now_s) if isinstance(event, chronicle.ALWAYS) and machine.ended is None else None
        self._take(event, now_s)
        return chronicle.recorded(event, machine.event, received, machine.out, now_s) if machine.out or received is not None else []

    def _take(self, event: Event, now_s: float) -> None:
        machine = self.state
        if machine.phase == Phase.END:
            ending.after_end(machine, event, now_s)
            return
        outstanding = bool(machine.roster.outstanding)
        _observe(machine, event, now_s)
        if machine.ended is None and not isinstance(event, Measured | Logged | Used | Reads | FilesFound | StepsTimed | LinesRefused):
            # Policies look at all ranks: they are asked at ticks, and when the last rank has answered, not for each word of each rank.
            _reconcile(machine, now_s, isinstance(event, Tick) or (outstanding and not machine.roster.outstanding))

    # ---- after the coordinator died ------------------------------------------------------------------------------------------------------

    def replay(self, records: Iterable[Record], now_s: float) -> None:
        """Rebuild from the journal of this very run. Ranks may train meanwhile: they get ``node_s`` to report before any is given up."""
        machine = self.state
        replay.rebuild(machine, records, now_s)
        machine.grace_until_s = now_s + machine.settings.timeouts.node_s if machine.phase != Phase.END else None

    def resume(self, records: Iterable[Record], now_s: float) -> list[Instruction]:
        """Go on in a new cluster, from the journal of a run whose ranks are all gone, up to ``Resumed``; returns what is to be written
        first."""
        machine = self.state
        machine.out = [Write(record) for record in replay.move(machine, records, now_s)]
        machine.out += machine.checkpoints.step_back(now_s)
        machine.deadline_s = now_s
        return machine.out


# ---- what an event says ------------------------------------------------------------------------------------------------------------------


def _observe(machine: MachineState, event: Event, now_s: float) -> None:
    match event:
        case Tick():
            ticks.tick(machine, now_s)
        case Joined():
            ranks.joined(machine, event, now_s)
        case Ready(member=member):
            ranks.ready(machine, member, now_s)
        case Quiesced():
            ranks.quiesced(machine, event, now_s)
        case Formed():
            ranks.formed(machine, event, now_s)
        case Finished() | Left():
            ranks.finished(machine, event, now_s)
        case Lost():
            leaving.lost(machine, event, now_s)
        case NodeLost(node=node, cause=cause, at_s=at_s):
            leaving.node_lost(machine, node, cause, at_s, now_s)
        case NodeJoined():
            nodes.joined(machine, event, now_s)
        case NodeSilent(node=node, at_s=at_s):
            leaving.hung_up(machine, node, at_s, now_s)
        case NodeLeaves():
            departures.announced(machine, event, now_s)
        case NodeStays():
            departures.withdrawn(machine, event, now_s)
        case _:
            _observe_rare(machine, event, now_s)


def _observe_rare(machine: MachineState, event: Event, now_s: float) -> None:
    match event:
        case Explained():
            leaving.explained(machine, event, now_s)
        case Raised():
            leaving.raised(machine, event, now_s)
        case Measured(member=member) if machine.current(member):
            machine.write(Measurement(event.state, event.name, event.value, now_s))
        case Logged(member=member) if machine.current(member):
            for name, value in machine.figures.receive(event):
                machine.write(Measurement(event.state, name, value, now_s))
        case Used(member=member) if machine.current(member):
            exchange = event.exchanges, event.hidden_us, event.received_bytes, event.ahead_bytes
            rest = event.fetched_bytes, event.energy_j, event.metered_s
            machine.write(Usage(member, event.peak_bytes, event.device_peak_bytes, event.sent_bytes, now_s, *exchange, *rest))
        case OnceWanted(member=member, key=key) if machine.current(member):
            machine.out += machine.once.ask(member, key, lambda other: machine.current(other) is not None, now_s)
        case OnceDone(member=member, key=key, result=result) if machine.current(member):
            machine.out += machine.once.done(member, key, result, now_s)
        case LinesRefused(where=where, listener=listener, reason=reason, peer=peer, count=count):
            machine.write(RefusedLines(where, listener, reason, peer, count, now_s))
        case StepsTimed():
            machine.stragglers.take(event, machine.view, now_s)
        case OutputDropped(member=member) if machine.current(member):
            message = f"{event.dropped_bytes:,} bytes that rank {member} has printed are not kept: {event.reason}"
            machine.write(DecisionMade("output", "warn", message, None, now_s))
        case CopiesHeld() if machine.checkpoints.hold(event, machine.view) and machine.phase == Phase.RUN:
            probe("a memory that kept copies of the view begins anew")
            leaving.gather(machine, now_s, GatherWhy.MEMORY, f"the memory of {event.node}, which kept copies, began anew")
        case FaultReported():
            leaving.injected(machine, event)
        case SettingChanged():
            on_setting(machine, event, now_s)
        case RoomMissing(ranks=ranks, detail=detail):
            machine.write(DecisionMade("room", "warn" if ranks else "recovered", detail, Figures({"ranks": float(ranks)}), now_s))
        case NodesWanted(action=action, ranks=ranks, detail=detail, waited_s=waited_s):
            machine.write(DecisionMade("nodes", action, detail, NodesAsked(float(ranks), waited_s), now_s))
        case FloorReached():
            machine.write(floor.stops(event, now_s))
        case EvidenceWritten() | FilesFound() | Implausible() | Reads():
            evidence.note(machine, event, now_s)
        case Built() if machine.current(event.member):
            building.received(machine, event.build, now_s)
        case StopRequested():
            stopping.stop(machine, event, now_s)
        case _ if (said_by := getattr(event, "member", None)) is None or (machine.current(said_by) and machine.in_view(said_by)):
            machine.out += machine.checkpoints.handle(event, machine.view, now_s)


# ---- what should be ----------------------------------------------------------------------------------------------------------------------


def _reconcile(machine: MachineState, now_s: float, ask: bool) -> None:
    """Do something about the difference between what is and what should be; ``ask`` the policies too."""
    if machine.stopping is not None and stopping.is_over(machine, now_s):
        end(machine, machine.stopping.why, machine.stopping.reason, "", now_s)
    elif machine.grace_until_s is not None or (machine.stopping is not None and stopping.takes(machine, now_s)):
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
    if len(machine.finished) == len(view.members):
        ending.complete(machine, now_s)
    elif machine.finished:
        return
    elif machine.stopping is not None:
        stopping.halt(machine, now_s)
        return
    elif machine.proposal is not None:
        proposals.watch(machine, now_s)
    elif ask and proposals.try_grow(machine, now_s):
        return
    if ask:
        departures.tick(machine, view, now_s)
        resizing.tick(machine, view, now_s)
    if ask and machine.phase == Phase.RUN and machine.proposal is None:
        machine.out += machine.checkpoints.tick(view, now_s)
        machine.out += machine.progress.tick(machine.stragglers.steps_s, now_s)
        remedies.tick(machine, now_s)
