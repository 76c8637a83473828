"""Simulated node agents, and a simulated Ray Train that replaces dead processes."""

from __future__ import annotations

import functools
import random

from fleet.machine.roster import STOOD_STILL_S
from fleet.protocol.causes import ProcessEnded
from fleet.protocol.events import CopiesHeld, Event, Heartbeat, NodeJoined, NodeSilent, StepsTimed
from fleet.protocol.facts import ProcessLost
from fleet.protocol.instructions import Evict, Fence, Instruction, Propose, Publish, Quiesce, Welcome
from fleet.protocol.reach import LEASE, Reach
from fleet.protocol.types import Copy, Member
from fleet.settings.run import HANGUP_S
from fleet.simulation.clockwork import Stoppable
from fleet.simulation.columns import SimColumnLayout
from fleet.simulation.gathering import SimFsdpLayout
from fleet.simulation.links import AGAIN_S, HEAD
from fleet.simulation.ranks import SimLayout, SimRank
from fleet.simulation.sharded import SimZero1Layout
from fleet.simulation.stage import Stage
from fleet.simulation.steps import SimStep
from fleet.simulation.stores import SimMemory

SIMULATED = {"none": SimLayout, "zero1": SimZero1Layout, "fsdp": SimFsdpLayout}
"""Simulated layouts, by ``optimizer_sharding``."""
BEAT_S = 0.2
KEPT_LOST = 64
UNHEARD_S = 1.2
"""Seconds without an acknowledgement after which an agent gives its connection up."""
CALLS_AGAIN_S = (0.0, 0.6)
"""Seconds from the mending of a link until an agent is connected again: (least, most). It retries, for a part of `node_s` at a time."""


class SimNode(Stoppable):
    """One node and its agent. ``away`` counts the troubles that keep the agent from the coordinator now; its ranks carry on.

    ``line`` is the number of the agent's connection to the coordinator. While the agent is ``stopped`` (SIGSTOP), messages to it wait.
    """

    def __init__(self, world: Stage, index: int, capacity: int) -> None:
        super().__init__()
        self.world, self.index, self.capacity = world, index, capacity
        self.name = f"node-{index}"
        self.domain = f"rack-{index // world.plan.rack}" if world.plan.rack else ""
        self.alive, self.away, self.dismissed = True, 0, False
        self.line = 0
        self._life, self._stopped_s, self._last_seen_s = 0, 0.0, world.clock.now_s
        self._reach = Reach(world.clock.now_s, world.settings.timeouts.heartbeat_s * LEASE)
        self.ranks: dict[str, SimRank] = {}
        self.memory = SimMemory(f"{self.name}:0")
        self._reported: tuple[Copy, ...] | None = None
        self._lost: dict[Member, ProcessLost] = {}
        self._beat()

    def __str__(self) -> str:
        return self.name

    @property
    def reachable(self) -> bool:
        """Whether the coordinator can talk to the agent."""
        return self.away == 0

    def unanswered_s(self) -> float:
        """See :class:`fleet.simulation.stage.Host`."""
        return self._reach.unanswered_s(self.world.clock.now_s)

    # ---- up ------------------------------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to a coordinator, which may be a new one, and send it the node's state."""
        if not (self.alive and self.reachable):
            return
        self.up(NodeJoined(self.name, self.index, domain=self.domain))
        self._reported = None
        self.report_copies()
        for lost in self._lost.values():
            self.up(lost)
        for rank in list(self.ranks.values()):
            rank.reconnect()

    def up(self, event: Event) -> None:
        if self.alive and self.reachable:
            self.world.network.up(self, event)

    def from_rank(self, rank: SimRank, event: Event) -> None:
        self.gate(lambda: self.up(event))

    def report_copies(self) -> None:
        """Report the copies in the memory, if the coordinator may not know them."""
        held = self.memory.held()
        if held != self._reported and self.alive and self.reachable:
            self._reported = held
            self.up(CopiesHeld(self.name, self.memory.address, self.domain, held))

    def begin_anew(self) -> None:
        """The agent's process died and has started again: the copies in its memory are gone."""
        self.world.note("memory lost", self)
        self.memory = SimMemory(f"{self.name}:{self.world.clock.calls}")
        self.connect()

    def _beat(self) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.gate(self._beat)
            return
        stood_s, self._stopped_s = self._stopped_s, 0.0
        if not self.world.plan.fifo:
            self._reported = None  # messages may be lost here, unlike on a live connection, so it is repeated
        self.report_copies()
        self._mind_the_coordinator()
        if stood_s <= STOOD_STILL_S:  # like the live agent: right after it stood still it does not report its ranks
            self.up(Heartbeat(self.name, tuple(rank.pulse() for rank in self.ranks.values() if rank.named)))
        self._report_times()
        self.world.clock.after(BEAT_S, self._beat)

    def _mind_the_coordinator(self) -> None:
        """Like the live agent: its ranks leave their view when the coordinator's host cannot be reached."""
        now_s, links = self.world.clock.now_s, self.world.links
        if links.answers(self.name, HEAD):
            self._last_seen_s = now_s
        if self.reachable and links.answers(self.name, HEAD):
            self._receive(links.late_s(HEAD, (self.name,)) + links.late_s(self.name, (HEAD,)))
        if self._reach.lapses(now_s):
            for rank in [rank for rank in self.ranks.values() if rank.named]:
                rank.receive(Quiesce((rank.member,), rank.protocol.generation))
        if self.reachable and now_s - self._last_seen_s > UNHEARD_S:
            self._give_line_up()

    def _receive(self, late_s: float) -> None:
        """The coordinator's host acknowledges messages."""
        if late_s > 0:
            self.world.clock.after(late_s, lambda: self._reach.answered(self.world.clock.now_s))
        else:
            self._reach.answered(self.world.clock.now_s)

    def _give_line_up(self) -> None:
        self.world.note("line given up", self)
        self.line, self.away = self.line + 1, self.away + 1
        self._call(self._life)

    def _call(self, life: int) -> None:
        """Retry until the coordinator's host answers. Then its end of the old connection breaks, before or after there is a new one."""
        if not self.alive or life != self._life:
            return
        if not self.world.links.answers(self.name, HEAD):
            self.world.clock.after(BEAT_S, lambda: self._call(life))
            return
        old, lines = self.line, self.world.network.standing
        self._last_seen_s = self.world.clock.now_s
        self.world.clock.after(lines.uniform(*AGAIN_S), lambda: self._old_line_breaks(old))
        self.world.clock.after(lines.uniform(*CALLS_AGAIN_S), lambda: self.come_back() if life == self._life else None)

    def _old_line_breaks(self, old: int) -> None:
        if self.line == old and not self.reachable:
            self.world.submit(NodeSilent(self.name, self.world.clock.now_s))

    def _report_times(self) -> None:
        timed = [rank for rank in self.ranks.values() if rank.named and rank.timed.rows]
        for generation in sorted({rank.timed.generation for rank in timed}):
            here = [rank for rank in timed if rank.timed.generation == generation]
            self.up(StepsTimed(self.name, generation, self.world.plan.steps, tuple(rank.take_times() for rank in here)))

    def on_death(self, rank: SimRank, cause: str) -> None:
        self.ranks.pop(rank.protocol.token, None)
        if not self.alive or not rank.named:
            return
        step, shard = rank.where
        lost = ProcessLost(rank.member, ProcessEnded(), step=step, shard=shard, detail=cause, at_s=self.world.clock.now_s)
        self._lost[rank.member] = lost
        if len(self._lost) > KEPT_LOST:
            del self._lost[next(iter(self._lost))]
        self.world.clock.after(self.world.network.rng.uniform(0.001, 0.01), lambda: self.gate(lambda: self.up(lost)))

    # ---- troubles of the agent -----------------------------------------------------------------------------------------------------------

    def stop(self, duration_s: float) -> None:
        """SIGSTOP to the agent, and SIGCONT after ``duration_s``: its ranks carry on, and the kernel keeps messages to it."""
        if not self.stopped and self.alive:
            self.stopped, life, began_s = True, self._life, self.world.clock.now_s
            self.world.note("agent stopped", self, duration_s)
            self.world.clock.after(duration_s, lambda: self._go_on(life, began_s))

    def _go_on(self, life: int, began_s: float) -> None:
        if life != self._life:
            return
        queued = self.went_on(self.world.clock.now_s)
        self._stopped_s = self.went_on_s - began_s
        for call in queued:
            call()

    def stood_still(self, within_s: float) -> bool:
        """Whether the agent is stopped, or was within the last ``within_s``."""
        return self.stopped or self.world.clock.now_s - self.went_on_s <= within_s

    def kill_agent(self, absence_s: float) -> None:
        """SIGKILL to the agent. Its ranks and the copies in its memory end with it. It starts again after ``absence_s``."""
        self.world.note("agent killed", self)
        self._life, self.line, self.away = self._life + 1, self.line + 1, self.away + 1
        waits, self.stopped, self._queued = self._beat in self._queued, False, []
        for rank in list(self.ranks.values()):
            rank.die("killed with its agent")
        self._lost.clear()
        hung_up = functools.partial(self.world.submit, NodeSilent(self.name, self.world.clock.now_s))
        self.world.clock.after(0.01, lambda: self.world.links.deliver(HEAD, (self.name,), hung_up))
        self.world.clock.after(absence_s, self._begin_again)
        if waits:
            self._beat()

    def _begin_again(self) -> None:
        self.memory = SimMemory(f"{self.name}:{self.world.clock.calls}")
        self._last_seen_s = self.world.clock.now_s
        self.come_back()

    def lose(self, linger_s: float) -> None:
        """The node's agent is gone at once, its ranks ``linger_s`` later: a raylet may die before its workers do."""
        self.alive = False
        self.world.note("node lost", self)
        ranks = list(self.ranks.values())
        for rank in ranks:
            self.world.clock.after(linger_s, lambda rank=rank: rank.die("its node was lost"))  # type: ignore[misc]
            self.world.clock.after(HANGUP_S, lambda rank=rank: rank.alone())  # type: ignore[misc]
            self.world.train.forget(rank.protocol.slot, rank)

    def come_back(self) -> None:
        """One trouble that kept the agent away is over."""
        self.away -= 1
        if self.alive and self.reachable:
            self.world.note("back", self)
            self.lose(0.0) if self.dismissed else self.connect()

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
            case Publish(view=view):
                self._pass_on(message, view.members)
            case Propose(view=view, leaving=leaving):
                self._pass_on(message, (*view.members, *leaving))
            case _:
                self._pass_on(message, getattr(message, "members", ()))

    def _pass_on(self, message: Instruction, members: tuple[Member, ...]) -> None:
        for rank in list(self.ranks.values()):
            if rank.named and rank.member in members:
                rank.receive(message)


class SimTrain:
    """Starts a process in every slot, and replaces a lost one after a while, where there is room."""

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
        nodes = [node for node in self.world.nodes if node.alive and not node.dismissed and self._used(node) < node.capacity]
        if not nodes:
            self.world.clock.after(0.5, lambda: self.start(slot))
            return
        node = min(nodes, key=lambda node: (self._used(node), node.index))
        self._numbers += 1
        settings = self.world.settings
        layout = SimColumnLayout if settings.in_columns and not settings.spread else SIMULATED[settings.optimizer_sharding]
        rank = SimRank(self.world, slot, node, self._numbers, self.world.stream("rank", self._numbers), layout)
        SimStep(rank)
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
        """Take the slot's process for dead, although it may live, and start another one beside it."""
        if slot in self.current and rank in (None, self.current[slot]):
            del self.current[slot]
            self.replace(slot)
