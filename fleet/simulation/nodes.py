"""Simulated node agents, and a simulated Ray Train that replaces what died."""

from __future__ import annotations

import random

from fleet.protocol.causes import ProcessEnded
from fleet.protocol.events import CopiesHeld, Event, Heartbeat, Lost, NodeJoined, StepsTimed
from fleet.protocol.instructions import Evict, Fence, Instruction, Propose, Publish, Welcome
from fleet.protocol.types import Copy, Member
from fleet.simulation.memory import SimMemory
from fleet.simulation.ranks import SimRank
from fleet.simulation.sharded import ShardedRank
from fleet.simulation.stage import Stage
from fleet.simulation.steps import SteppingRank

BEAT_S = 0.2
KEPT_LOST = 64


class SimNode:
    """One node and its agent. ``reachable`` is False while the agent is partitioned or stopped; its ranks carry on."""

    def __init__(self, world: Stage, index: int, capacity: int) -> None:
        self.world, self.index, self.capacity = world, index, capacity
        self.name = f"node-{index}"
        self.alive = self.reachable = True
        self.ranks: dict[str, SimRank] = {}
        self.memory = SimMemory(f"{self.name}:0")
        self._told: tuple[Copy, ...] | None = None
        self._lost: dict[Member, Lost] = {}
        self._beat()

    def __str__(self) -> str:
        return self.name

    # ---- up ------------------------------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """To a coordinator that may be a new one: tell it all that it should know."""
        if not (self.alive and self.reachable):
            return
        self.up(NodeJoined(self.name, self.index))
        self._told = None
        self.tell_copies()
        for lost in self._lost.values():
            self.up(lost)
        for rank in list(self.ranks.values()):
            rank.reconnect()

    def up(self, event: Event) -> None:
        if self.alive and self.reachable:
            self.world.network.up(self, event)

    def from_rank(self, rank: SimRank, event: Event) -> None:
        self.up(event)

    def tell_copies(self) -> None:
        """What the memory holds, if the coordinator may not know it."""
        held = self.memory.held()
        if held != self._told and self.alive and self.reachable:
            self._told = held
            self.up(CopiesHeld(self.name, self.memory.address, "", held))

    def begin_anew(self) -> None:
        """The agent's process died and is there again: what its memory held is gone."""
        self.world.note("memory lost", self)
        self.memory = SimMemory(f"{self.name}:{self.world.clock.calls}")
        self.connect()

    def _beat(self) -> None:
        if not self.alive:
            return
        if not self.world.plan.fifo:
            self._told = None  # messages are lost: a connection that loses one is no connection, so it is said again
        self.tell_copies()
        pulses = tuple(rank.pulse() for rank in self.ranks.values() if rank.named)
        self.up(Heartbeat(self.name, pulses))
        self._report_times()
        self.world.clock.after(BEAT_S, self._beat)

    def _report_times(self) -> None:
        timed = [rank for rank in self.ranks.values() if rank.named and rank.times]
        for generation in sorted({rank.timed_generation for rank in timed}):
            here = [rank for rank in timed if rank.timed_generation == generation]
            self.up(StepsTimed(self.name, generation, self.world.plan.steps, tuple(rank.take_times() for rank in here)))

    def on_death(self, rank: SimRank, cause: str) -> None:
        self.ranks.pop(rank.protocol.token, None)
        if not self.alive or not rank.named:
            return
        lost = Lost(rank.member, ProcessEnded(), self.world.clock.now_s, *rank.where, cause)
        self._lost[rank.member] = lost
        if len(self._lost) > KEPT_LOST:
            del self._lost[next(iter(self._lost))]
        self.world.clock.after(self.world.network.rng.uniform(0.001, 0.01), lambda: self.up(lost))

    def lose(self, linger_s: float) -> None:
        """The node's agent is gone at once, its ranks ``linger_s`` later: a raylet may die before its workers do."""
        self.alive = False
        self.world.note("node lost", self)
        ranks = list(self.ranks.values())
        for rank in ranks:
            self.world.clock.after(linger_s, lambda rank=rank: rank.die("its node was lost"))  # type: ignore[misc]
            self.world.train.forget(rank.protocol.slot, rank)

    def come_back(self) -> None:
        if self.alive and not self.reachable:
            self.world.note("back", self)
            self.reachable = True
            self.connect()

    # ---- down ----------------------------------------------------------------------------------------------------------------------------

    def take(self, message: Instruction) -> None:
        match message:
            case Evict(process=process):
                for rank in list(self.ranks.values()):
                    if rank.protocol.process == process:
                        rank.die(f"evicted: {message.why}")
                if message.member in self._lost:
                    self.up(self._lost[message.member])
            case Welcome(token=token) | Fence(token=token):
                if token in self.ranks:
                    self.ranks[token].receive(message)
            case Publish(view=view) | Propose(view=view):
                self._pass_on(message, view.members)
            case _:
                self._pass_on(message, getattr(message, "members", ()))

    def _pass_on(self, message: Instruction, members: tuple[Member, ...]) -> None:
        for rank in list(self.ranks.values()):
            if rank.named and rank.member in members:
                rank.receive(message)


class SimTrain:
    """Starts a process in every slot, and another one a while after it sees one gone, where there is room."""

    def __init__(self, world: Stage, rng: random.Random, delay_s: tuple[float, float]) -> None:
        self.world, self.rng, self.delay_s = world, rng, delay_s
        self.current: dict[int, SimRank] = {}
        self.processes: list[SimRank] = []
        self._numbers = 0

    def start_all(self) -> None:
        for slot in range(self.world.settings.slots):
            self.start(slot)

    def start(self, slot: int) -> None:
        """Start a process in ``slot``, or try again later when no node has room."""
        if self.world.over:
            return
        nodes = [node for node in self.world.nodes if node.alive and self._used(node) < node.capacity]
        if not nodes:
            self.world.clock.after(0.5, lambda: self.start(slot))
            return
        node = min(nodes, key=lambda node: (self._used(node), node.index))
        self._numbers += 1
        kind = ShardedRank if self.world.settings.optimizer_sharding == "zero1" else SteppingRank
        rank = kind(self.world, slot, node, self._numbers, self.world.stream("rank", self._numbers))
        self.current[slot] = rank
        self.processes.append(rank)
        node.ranks[rank.protocol.token] = rank
        self.world.note("started", f"slot {slot} on {node}", rank.protocol.token)

    def _used(self, node: SimNode) -> int:
        return sum(rank.node.name == node.name for rank in self.current.values())

    def on_death(self, rank: SimRank) -> None:
        if self.current.get(rank.protocol.slot) is rank:
            del self.current[rank.protocol.slot]
            self.replace(rank.protocol.slot)

    def replace(self, slot: int) -> None:
        self.world.clock.after(self.rng.uniform(*self.delay_s), lambda: self.start(slot) if slot not in self.current else None)

    def forget(self, slot: int, rank: SimRank | None = None) -> None:
        """Believe that the slot's process is gone although it may live: another one is started beside it."""
        if slot in self.current and rank in (None, self.current[slot]):
            del self.current[slot]
            self.replace(slot)
