"""One simulated run, from its first process to its last."""

from __future__ import annotations

import random
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fleet.machine.core import FleetMachine
from fleet.protocol.events import Event, PartWritten
from fleet.protocol.instructions import EndRun
from fleet.protocol.levels import PEERS_SCHEME
from fleet.protocol.records import VERSION, Record, Resumed, RunEnded, RunStarted
from fleet.protocol.types import StateId, View
from fleet.settings.run import RunSettings
from fleet.simulation.checker import Violation
from fleet.simulation.clockwork import Clockwork
from fleet.simulation.coordinator import Network, SimCoordinator
from fleet.simulation.faults import Faults
from fleet.simulation.groups import SimGroup
from fleet.simulation.invariants import Watch
from fleet.simulation.links import HEAD, Links
from fleet.simulation.model import POISON, Chain
from fleet.simulation.nodes import SimNode, SimTrain
from fleet.simulation.plan import Plan
from fleet.simulation.ranks import SimRank
from fleet.simulation.rng import stream
from fleet.simulation.stores import Store

MakeMachine = Callable[[RunSettings, Plan, float], FleetMachine]
TRACE_LINES = 30


@dataclass(frozen=True)
class Outcome:
    """How a simulated run went. ``broken`` names the invariant that did not hold, empty when all did."""

    seed: int
    status: str
    reason: str
    broken: str
    complaint: str
    trace: tuple[str, ...]
    world: World

    def report(self, again: str = "") -> str:
        """The broken invariant, the last lines of the trace, and the command that repeats the run, if there is one."""
        what = f"seed {self.seed}: invariant {self.broken!r} does not hold: {self.complaint}"
        return "\n".join([what, "the last lines of its trace:", *self.trace, *([f"repeat with: {again}"] if again else [])])


class SimGroups:
    """The process groups of a run: ranks meet by generation and store, whatever they believe the view to be."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._found: dict[tuple[int, str], SimGroup] = {}

    def of(self, world: World, view: View) -> SimGroup:
        group = self._found.get((view.generation, view.store))
        if group is None:
            group = SimGroup(world.clock, self._rng, view, world.watch.completed, world.links)
            self._found[view.generation, view.store] = group
        return group


@dataclass(slots=True)
class CoordinatorDeaths:
    """How many there were; the last one takes ``stale`` records with it, and the next life begins ``absence_s`` later."""

    count: int = 0
    stale: int = 0
    absence_s: float = 0.05


class World:
    """Everything that a run consists of.

    Args:
        plan: size, network, troubles.
        make_machine: builds the live machine with its policies; called for every life of the coordinator.
        keep_trace: keep the whole trace, not only its last lines.
    """

    def __init__(self, plan: Plan, make_machine: MakeMachine, keep_trace: bool = False) -> None:
        self.plan = plan
        self._make_machine = make_machine
        self.clock = Clockwork()
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=None if keep_trace else TRACE_LINES)
        self.chain = Chain(plan.seed, plan.settings.shards)
        self.journal: list[Record] = []
        self.links = Links(self.clock, self.stream("links"))
        self.network = Network(self, self.stream("network"))
        self.store = Store(self, self.stream("store"))
        self.watch = Watch(self)
        self.nodes: list[SimNode] = []
        self.train = SimTrain(self, self.stream("train"), plan.restart_s)
        self.ended: EndRun | RunEnded | None = None
        self.coordinator: SimCoordinator | None = None
        self.deaths = CoordinatorDeaths()
        self.flipped = False
        """A bit has flipped in what some rank held: without that nothing is excused."""
        self.excused = False
        """What is wrong was held by one rank alone when others were given it, so that nobody could tell."""
        self.unseen: set[StateId] = set()
        """States made of what one rank alone had put in: the others, newcomers, had nothing to compare. They see it in the next step."""
        self._groups = SimGroups(self.stream("groups"))
        self.faults = Faults(self, plan.troubles)

    def stream(self, *path: object) -> random.Random:
        return stream(self.plan.seed, *path)

    @property
    def settings(self) -> RunSettings:
        return self.plan.settings

    @property
    def over(self) -> bool:
        return self.ended is not None

    def note(self, *words: Any) -> None:
        """A line of the trace; formatted only when somebody reads it."""
        self.trace.append((self.clock.now_s, *words))

    # ---- the run -------------------------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        broken = complaint = ""
        try:
            self._start()
            self.clock.run(self.plan.deadline_s, self._all_quiet)
            self.watch.end()
        except Violation as violation:
            broken, complaint = violation.name, violation.text
        except Exception:  # noqa: BLE001  a crash of the live code is a finding like any other
            broken, complaint = "no exception", traceback.format_exc()
        trace = tuple(f"{line[0]:9.4f} " + " ".join(map(str, line[1:])) for line in self.trace)
        status, reason = (self.ended.status, self.ended.reason) if self.ended is not None else ("", "")
        return Outcome(self.plan.seed, status, reason, broken, complaint, trace, self)

    def _start(self) -> None:
        settings = self.settings
        self.append(RunStarted(VERSION, "simulated", 0.0, 0.0, settings.world, settings.slots - settings.world, settings.shards, ""))
        for _ in range(settings.nodes):
            self.add_node()
        self._raise_coordinator(self.make_machine())
        for node in self.nodes:
            node.connect()
        self.train.start_all()

    def _all_quiet(self) -> bool:
        """The run has ended, and every process that could hear of it has exited."""
        return self.over and not self.reachable()

    def reachable(self) -> list[SimRank]:
        """The processes that run, and that the coordinator could talk to."""
        return [rank for rank in self.train.processes if rank.alive and rank.responsive and rank.node.alive and rank.node.reachable]

    def make_machine(self) -> FleetMachine:
        return self._make_machine(self.settings, self.plan, self.clock.now_s)

    def end(self, end: EndRun | RunEnded) -> None:
        self.ended = end
        self.note("END", end.status, end.reason)

    # ---- parts ---------------------------------------------------------------------------------------------------------------------------

    def add_node(self) -> None:
        node = SimNode(self, len(self.nodes), self.plan.capacity)
        self.nodes.append(node)
        self.links.joins(node.name)
        node.connect()

    def group(self, view: View) -> SimGroup:
        """The process group of ``view``."""
        group = self._groups.of(self, view)
        self.watch.meet(group.view, view)
        return group

    # ---- memories ------------------------------------------------------------------------------------------------------------------------

    def memories(self, place: str, host: str = HEAD) -> list[SimNode]:
        """The nodes whose memories a URL names, as far as they answer to ``host``."""
        addresses = place.removeprefix(PEERS_SCHEME).split(",")
        there = [node for node in self.nodes if node.memory.address in addresses and node.alive and node.reachable]
        return [node for node in there if self.links.answers(host, node.name)]

    @staticmethod
    def part_of(nodes: Iterable[SimNode], checkpoint: str, number: int) -> int | None:
        held = (node.memory.checkpoints.get(checkpoint) for node in nodes)
        return next((one.parts[number] for one in held if one is not None and number in one.parts), None)

    def copy(self, host: str, view: View, rank: int, weights: int, event: PartWritten) -> bool:
        """A rank on ``host`` sends its part to the memories that keep it. False when one of them does not answer, or refuses."""
        addresses = view.copies[rank]
        nodes = self.memories(",".join(addresses), host)
        taken = [node.memory.put(event.checkpoint, event.state, view.generation, rank, weights) for node in nodes]
        return len(taken) == len(addresses) and all(taken)

    def load(self, host: str, checkpoint: str) -> int | None:
        """The weights of a checkpoint, read on ``host``; poison when its parts are not of one state, None when one cannot be had."""
        if not checkpoint.startswith(PEERS_SCHEME):
            return self.store.load(checkpoint)
        place, _, name = checkpoint.rpartition("/")
        nodes = self.memories(place, host)
        count = max((node.memory.checkpoints[name].count for node in nodes if name in node.memory.checkpoints), default=0)
        parts = [self.part_of(nodes, name, number) for number in range(count)]
        if not parts or None in parts:
            return None
        if len(set(parts)) > 1 and self.flipped:
            return hash(tuple(parts))  # one saved what was wrong in it: not half written, and not right
        return parts[0] if len(set(parts)) == 1 else POISON

    # ---- the coordinator -----------------------------------------------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """From the driver process, whose calls are reliable while there is a coordinator."""
        if self.coordinator is not None:
            self.coordinator.submit(event)

    def append(self, record: Record) -> None:
        self.note("   journal", record)
        self.journal.append(record)
        self.watch.record(record)

    def kill_coordinator(self, after: int, stale: int, absence_s: float) -> None:
        """Kill it ``after`` more instructions; the last ``stale`` records go with it, but none from before it started."""
        if self.coordinator is not None and self.coordinator.dies_in is None:
            self.coordinator.dies_in = after
            self.deaths.stale, self.deaths.absence_s = stale, absence_s
            if self.coordinator.stopped:
                self.coordinator_died()

    def coordinator_died(self) -> None:
        self.note("coordinator killed", f"{self.deaths.stale} records lost")
        self.coordinator = None
        self.deaths.count += 1
        fresh = next(i for i, record in enumerate(reversed(self.journal)) if isinstance(record, Resumed | RunStarted))
        lost = min(self.deaths.stale, fresh) if not self.over else 0  # the driver knows how the run ended, whatever is forgotten
        if lost:
            del self.journal[-lost:]
            self.watch.truncated(self.journal)
        self.clock.after(self.deaths.absence_s, self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        machine = self.make_machine()
        machine.replay(list(self.journal), self.clock.now_s)
        self.append(Resumed(self.clock.now_s, 0.0, "the coordinator was restarted", gap=False))
        self._raise_coordinator(machine)
        if machine.state.ending.record is not None and not self.over:
            self.end(machine.state.ending.record)
        for node in self.nodes:
            self.clock.after(self.network.rng.uniform(0.01, 0.5), lambda node=node: node.gate(node.connect))  # type: ignore[misc]

    def _raise_coordinator(self, machine: FleetMachine) -> None:
        self.coordinator = SimCoordinator(self, machine)
        self.coordinator.tick()
