"""A simulated coordinator process around the live ``FleetMachine``, its network and its checkpoint store."""

from __future__ import annotations

import random
from typing import Any

from fleet.machine.core import FleetMachine
from fleet.protocol.events import CheckpointDurable, CheckpointFailed, Event, Heartbeat, Joined, StepsTimed, Tick
from fleet.protocol.instructions import CommitCheckpoint, EndRun, Evict, Fence, Inspect, Instruction, Propose, Publish, Welcome, Write
from fleet.protocol.levels import PEERS, level_at
from fleet.protocol.types import Member
from fleet.simulation.nodes import SimNode
from fleet.simulation.stage import Stage

TICK_S = 0.1


class Network:
    """Between agents and the coordinator. Not ``fifo``: messages overtake each other. Perfect once the plan's troubles are over."""

    def __init__(self, world: Stage, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.up_messages = self.down_messages = 0
        self._arrival_s: dict[tuple[str, bool], float] = {}

    def up(self, node: SimNode, event: Event) -> None:
        target = self.world.coordinator
        if isinstance(event, StepsTimed):  # nobody waits for it, and what is lost is not sent again
            self.world.clock.after(self.world.plan.delay_s[1], lambda: self._deliver(node, event, target))
            return
        if not isinstance(event, Heartbeat):
            self.up_messages += 1
        for delay_s in self._delays(node, True):
            self.world.clock.after(delay_s, lambda: self._deliver(node, event, target))

    def _deliver(self, node: SimNode, event: Event, target: SimCoordinator | None) -> None:
        if target is not None and target is self.world.coordinator and node.reachable:
            target.learn(node, event)
            target.submit(event)

    def down(self, node: SimNode, message: Instruction) -> None:
        self.down_messages += 1
        for delay_s in self._delays(node, False):
            self.world.clock.after(delay_s, lambda: node.take(message) if node.alive and node.reachable else None)

    def _delays(self, node: SimNode, up: bool) -> list[float]:
        """How long each copy of a message takes; none when it is lost."""
        plan, rng, now_s = self.world.plan, self.rng, self.world.clock.now_s
        if not node.reachable:
            return []
        if plan.fifo or now_s > plan.quiet_s:
            at_s = max(now_s + rng.uniform(*plan.delay_s), self._arrival_s.get((node.name, up), 0.0))
            self._arrival_s[node.name, up] = at_s
            return [at_s - now_s]
        copies = 0 if rng.random() < plan.loss else 2 if rng.random() < plan.duplicates else 1
        return [rng.uniform(*plan.delay_s) for _ in range(copies)]


class Store:
    """Durable checkpoints: parts are put, a commit makes them one, and fails when they do not belong together."""

    def __init__(self, world: Stage, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.failing_until_s = -1.0
        self._parts: dict[tuple[str, int], int] = {}
        self._committed: dict[str, int] = {}

    @property
    def failing(self) -> bool:
        return self.world.clock.now_s < self.failing_until_s

    def put(self, name: str, rank: int, weights: int) -> bool:
        if not self.failing:
            self._parts[name, rank] = weights
        return not self.failing

    def load(self, checkpoint: str) -> int:
        return self._committed[checkpoint.rpartition("/")[2]]

    def perform(self, order: CommitCheckpoint, coordinator: SimCoordinator) -> None:
        self.world.clock.after(self.rng.uniform(0.02, 0.5), lambda: self._commit(order, coordinator))

    def _commit(self, order: CommitCheckpoint, coordinator: SimCoordinator) -> None:
        level = level_at(order.place)
        done = self._commit_in_memory(order) if level == PEERS else self._commit_here(order)
        if not done:
            coordinator.submit(CheckpointFailed(order.checkpoint, f"the {level} fails", level))
            return
        latency_s = self.world.clock.now_s - order.requested_at_s
        coordinator.submit(CheckpointDurable(order.checkpoint, order.state, len(order.parts), order.blocked_s, latency_s, level))

    def _commit_here(self, order: CommitCheckpoint) -> bool:
        parts = [self._parts.get((order.checkpoint, rank)) for rank in range(len(order.parts))]
        self.world.watch.checkpoint(order, parts)
        if not self.failing and parts[0] is not None:
            right = self.world.chain.weights(order.state.step)
            self._committed[order.checkpoint] = next((part for part in parts if part is not None and part != right), right)
        return not self.failing

    def _commit_in_memory(self, order: CommitCheckpoint) -> bool:
        """In all memories of its place, each of which answers, and if every part is in one of them."""
        nodes = self.world.memories(order.place)
        generation = int(order.checkpoint.rpartition("-g")[2])
        parts = [self.world.part_of(nodes, order.checkpoint, number) for number in range(len(order.parts))]
        if len(nodes) < order.place.count(",") + 1 or None in parts:
            return False
        self.world.watch.checkpoint(order, parts)
        for node in nodes:
            node.memory.commit(order.checkpoint, order.state, generation, len(parts))
        return True


class SimCoordinator:
    """One life of the coordinator. ``dies_in`` counts down the instructions until it is killed."""

    def __init__(self, world: Stage, machine: FleetMachine) -> None:
        self.world, self.machine = world, machine
        self.dies_in: int | None = None
        self._tokens: dict[str, SimNode] = {}
        self._late: dict[int, SimNode] = {}

    @property
    def alive(self) -> bool:
        return self.world.coordinator is self

    def tick(self) -> None:
        """Tick for as long as this life lasts."""
        if self.alive:
            self.submit(Tick())
            self.world.clock.after(TICK_S, self.tick)

    def learn(self, node: SimNode, event: Event) -> None:
        """Where a process lives that the machine does not hold, or not yet."""
        if isinstance(event, Joined):
            self._tokens[event.token] = node
            if self.machine.state.ended is not None:
                self._late[event.slot] = node

    def submit(self, event: Event) -> None:
        """As the live driver does: what is written is in the journal before anything after it is performed."""
        if not self.alive:
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
        """The nodes that an instruction concerns; each gets it once, however many of its ranks are meant."""
        match instruction:
            case Publish(view=view) | Propose(view=view):
                members: tuple[Member, ...] = view.members
            case Welcome(token=token) | Fence(token=token):
                return [self._tokens[token]] if token in self._tokens else []
            case Inspect(nodes=names):
                return [node for node in self.world.nodes if node.name in names]
            case Evict(process=process):
                return [node for node in self.world.nodes if node.name == process.node]
            case _:
                members = getattr(instruction, "members", ())
        nodes: dict[str, Any] = {}
        for member in members:
            node = self._node_of(member)
            if node is not None:
                nodes[node.name] = node
        return list(nodes.values())

    def _node_of(self, member: Member) -> SimNode | None:
        rank = self.machine.state.roster.current(member)
        if rank is None:
            return self._late.get(member.slot)
        return next((node for node in self.world.nodes if node.name == rank.process.node), None)
