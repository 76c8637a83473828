"""One simulated run, from its first process to its last."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from fleet.machine.core import FleetMachine
from fleet.protocol.records import VERSION, Resumed, RunStarted
from fleet.simulation.checker import Violation
from fleet.simulation.coordinator import Network, SimCoordinator
from fleet.simulation.faults import Faults
from fleet.simulation.invariants import Watch
from fleet.simulation.nodes import SimNode, SimTrain
from fleet.simulation.plan import Plan
from fleet.simulation.stage import MakeMachine, Stage
from fleet.simulation.stores import Store


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated run. ``broken`` names the invariant that did not hold, empty when all did."""

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


@dataclass(slots=True)
class CoordinatorDeaths:
    """``count`` deaths of the coordinator. The last one loses ``stale`` records, and the next life begins ``absence_s`` later."""

    count: int = 0
    stale: int = 0
    absence_s: float = 0.05


class World(Stage):
    """All parts of a run.

    Args:
        plan: size, network, troubles.
        make_machine: builds the live machine with its policies; called for every life of the coordinator.
        keep_trace: keep the whole trace, and not only its last lines.
    """

    def __init__(self, plan: Plan, make_machine: MakeMachine, keep_trace: bool = False) -> None:
        super().__init__(plan, make_machine, keep_trace)
        self.network = Network(self, self.stream("network"))
        self.store = Store(self, self.stream("store"))
        self.watch = Watch(self)
        self.train = SimTrain(self, self.stream("train"), plan.restart_s)
        self.deaths = CoordinatorDeaths()
        self.faults = Faults(self, plan.troubles)

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
        """The run has ended, and every process that can be told has exited."""
        return self.over and not self.reachable()

    # ---- parts ---------------------------------------------------------------------------------------------------------------------------

    def add_node(self) -> None:
        node = SimNode(self, len(self.nodes), self.plan.capacity)
        self.nodes.append(node)
        self.links.joins(node.name)
        node.connect()

    # ---- the coordinator -----------------------------------------------------------------------------------------------------------------

    def kill_coordinator(self, after: int, stale: int, absence_s: float) -> None:
        """Kill it ``after`` more instructions. The last ``stale`` records are lost with it, but no record from before its start."""
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
        lost = min(self.deaths.stale, fresh) if not self.over else 0  # the driver knows the end of the run, even if records are lost
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
