"""A simulated coordinator process around the live ``FleetMachine``, and its network."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from fleet.machine.core import FleetMachine
from fleet.machine.routes import Routes
from fleet.protocol.events import Event, Heartbeat, StepsTimed, Tick
from fleet.protocol.instructions import CommitCheckpoint, EndRun, Inspect, Instruction, Write
from fleet.simulation.clockwork import Stoppable
from fleet.simulation.links import HEAD, Pipe
from fleet.simulation.nodes import SimNode
from fleet.simulation.stage import Stage

TICK_S = 0.1


class Network:
    """The network between agents and the coordinator. Without ``fifo``, messages overtake each other. It is perfect once the plan's
    troubles are over.

    A message belongs to one connection: if the agent gives the connection up, messages on their way never arrive.
    """

    def __init__(self, world: Stage, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.standing = world.stream("standing still")
        self.up_messages = self.down_messages = 0
        self._arrival_s: dict[tuple[str, bool], float] = {}
        self._pipes: dict[tuple[str, int, bool], Pipe] = {}

    def up(self, node: SimNode, event: Event) -> None:
        target, line, pipe = self.world.coordinator, node.line, self._pipe(node, up=True)
        if isinstance(event, StepsTimed):  # no process waits for it, and it is not sent again
            delays_s = [self.world.plan.delay_s[1]]
        else:
            delays_s = self._delays(node, True)
            self.up_messages += not isinstance(event, Heartbeat)
        for delay_s in delays_s:
            self.world.clock.after(delay_s, lambda: self._pass(node, pipe, lambda: self._deliver(node, line, event, target)))

    def _deliver(self, node: SimNode, line: int, event: Event, target: SimCoordinator | None) -> None:
        if target is not None and target is self.world.coordinator and node.reachable and node.line == line:
            target.routes.learn(event)
            target.submit(event)

    def down(self, node: SimNode, message: Instruction) -> None:
        self.down_messages += 1
        line, pipe = node.line, self._pipe(node, up=False)
        for delay_s in self._delays(node, False):
            self.world.clock.after(delay_s, lambda: self._pass(node, pipe, lambda: self._hand(node, line, message)))

    @staticmethod
    def _pass(node: SimNode, pipe: Pipe, arrive: Callable[[], None]) -> None:
        if node.reachable:
            pipe.put(arrive)

    @staticmethod
    def _hand(node: SimNode, line: int, message: Instruction) -> None:
        if node.alive and node.reachable and node.line == line:
            node.gate(lambda: node.take(message))

    def _pipe(self, node: SimNode, up: bool) -> Pipe:
        """One direction of the agent's present connection."""
        key = (node.name, node.line, up)
        if key not in self._pipes:
            ends = (node.name, HEAD) if up else (HEAD, node.name)
            self._pipes[key] = Pipe(self.world.clock, self.world.links, *ends)
        return self._pipes[key]

    def _delays(self, node: SimNode, up: bool) -> list[float]:
        """The seconds that each copy of a message takes; empty when the message is lost."""
        plan, rng, now_s = self.world.plan, self.rng, self.world.clock.now_s
        if not node.reachable:
            return []
        if plan.fifo or now_s > plan.quiet_s:
            at_s = max(now_s + rng.uniform(*plan.delay_s), self._arrival_s.get((node.name, up), 0.0))
            self._arrival_s[node.name, up] = at_s
            return [at_s - now_s]
        copies = 0 if rng.random() < plan.loss else 2 if rng.random() < plan.duplicates else 1
        return [rng.uniform(*plan.delay_s) for _ in range(copies)]


class SimCoordinator(Stoppable):
    """One life of the coordinator. ``dies_in`` counts down the instructions until it is killed.

    While it is ``stopped`` (SIGSTOP), its events wait. After that they come all at once, with a tick before or between them.
    """

    def __init__(self, world: Stage, machine: FleetMachine) -> None:
        super().__init__()
        self.world, self.machine = world, machine
        self.dies_in: int | None = None
        self.routes = Routes(machine.state)

    @property
    def alive(self) -> bool:
        return self.world.coordinator is self

    def tick(self) -> None:
        """Tick until the end of this life."""
        if self.alive and not self.stopped:
            self.submit(Tick())
            self.world.clock.after(TICK_S, self.tick)

    def stop(self, duration_s: float) -> None:
        """SIGSTOP, and SIGCONT after ``duration_s``, unless the coordinator is killed before."""
        if not self.stopped:
            self.stopped = True
            self.world.note("coordinator stopped", duration_s)
            self.world.clock.after(duration_s, self._go_on)

    def stood_still(self, within_s: float) -> bool:
        """Whether the coordinator was stopped within the last ``within_s``."""
        return self.world.clock.now_s - self.went_on_s <= within_s

    def _go_on(self) -> None:
        if not self.alive:
            return
        queued = self.went_on(self.world.clock.now_s)
        rng = self.world.network.standing
        queued.insert(rng.choice((0, rng.randint(0, len(queued)))), self.tick)
        for call in queued:
            call()

    def submit(self, event: Event) -> None:
        """Handle an event like the live driver: a record is in the journal before later instructions are performed."""
        if not self.alive:
            return
        if self.stopped:
            self.gate(functools.partial(self.submit, event))
            return
        instructions = self.world.watch.handle(self.machine, event, self.world.clock.now_s)
        for instruction in instructions:
            if self.dies_in is not None:
                self.dies_in -= 1
                if self.dies_in < 0:
                    self.world.coordinator_died()
                    return
            self._perform(instruction)

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Write(record=record):
                self.world.append(record)
            case CommitCheckpoint():
                self.world.store.perform(instruction, self)
            case EndRun():
                self.world.end(instruction)
            case _:
                self.world.note("->", instruction)
                self.world.watch.sent(self.machine, instruction)
                for node in self._route(instruction):
                    self.world.network.down(node, instruction)

    def _route(self, instruction: Instruction) -> list[SimNode]:
        nodes = {node.name: node for node in self.world.nodes}
        names = self.routes.of(instruction)
        if isinstance(instruction, Inspect):  # in the order of the nodes' numbers
            names.sort(key=list(nodes).index)
        return [nodes[name] for name in names]
