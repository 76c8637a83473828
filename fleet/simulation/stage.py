"""The interface of the simulated world for its parts: ranks, nodes, the coordinator and the checkers.

``fleet.simulation.world.World`` creates the parts, and each part uses the world. The parts import this module instead of the world, so that
no two modules import each other. Types of parts that other parts do not need are ``Any`` here.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from fleet.machine.core import FleetMachine
from fleet.protocol.events import Event, PartWritten
from fleet.protocol.instructions import EndRun
from fleet.protocol.levels import PEERS_SCHEME
from fleet.protocol.records import Record, RunEnded
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings
from fleet.simulation.clockwork import Clockwork
from fleet.simulation.groups import SimGroup
from fleet.simulation.links import HEAD, Links
from fleet.simulation.model import POISON, Chain
from fleet.simulation.plan import Plan
from fleet.simulation.rng import stream

MakeMachine = Callable[[RunSettings, Plan, float], FleetMachine]
TRACE_LINES = 30


class Host(Protocol):
    """A rank's interface to its node."""

    name: str
    domain: str
    alive: bool
    from_rank: Callable[..., None]
    on_death: Callable[..., None]

    @property
    def reachable(self) -> bool:
        """Whether the coordinator can reach the node's agent."""

    def unanswered_s(self) -> float:
        """Seconds since the coordinator's host has answered the node's agent."""


class SimGroups:
    """The process groups of a run. Ranks meet by generation and store, even if they have different views of one generation.

    Ranks that compute a shard together have a group of their own beside that of the whole view.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._found: dict[tuple[int, str, tuple[int, ...]], SimGroup] = {}

    def of(self, world: Stage, view: View, together: tuple[int, ...] = ()) -> SimGroup:
        key = view.generation, view.store, together
        if key not in self._found:
            inside = replace(view, members=tuple(view.members[rank] for rank in together)) if together else view
            completed = (lambda view, values: None) if together else world.watch.completed
            self._found[key] = SimGroup(world.clock, self._rng, inside, completed, world.links)
        return self._found[key]


class Stage(ABC):
    """The world, as its parts know it. ``train`` starts processes again; ``watch`` has a method for each hook of a checker."""

    network: Any
    store: Any
    watch: Any
    train: Any
    faults: Any

    def __init__(self, plan: Plan, make_machine: MakeMachine, keep_trace: bool = False) -> None:
        self.plan, self._make_machine = plan, make_machine
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=None if keep_trace else TRACE_LINES)
        self.clock = Clockwork()
        self.chain = Chain(plan.seed, plan.settings.shards)
        self.journal: list[Record] = []
        self.links = Links(self.clock, self.stream("links"))
        self.nodes: list[Any] = []
        self.ended: EndRun | RunEnded | None = None
        self.coordinator: Any = None
        self.flipped = False
        """A bit has flipped in the state of some rank. Without a flip no wrong value is excused."""
        self.excused = False
        """Only one rank held the state when it gave its wrong state to others, so no other rank could tell."""
        self.unseen: set[StateId] = set()
        """States from the values of one rank alone: the others were newcomers without a state to compare. They compare in the next step."""
        self._groups = SimGroups(self.stream("groups"))

    def stream(self, *path: object) -> random.Random:
        return stream(self.plan.seed, *path)

    @property
    def settings(self) -> RunSettings:
        return self.plan.settings

    @property
    def over(self) -> bool:
        return self.ended is not None

    def note(self, *words: Any) -> None:
        """Add a line to the trace. It is formatted only when it is read."""
        self.trace.append((self.clock.now_s, *words))

    def reachable(self) -> list[Any]:
        """The live processes that the coordinator can reach."""
        return [rank for rank in self.train.processes if rank.alive and rank.responsive and rank.node.alive and rank.node.reachable]

    def make_machine(self) -> FleetMachine:
        return self._make_machine(self.settings, self.plan, self.clock.now_s)

    def end(self, end: EndRun | RunEnded) -> None:
        self.ended = end
        self.note("END", end.status, end.reason)

    def group(self, view: View) -> SimGroup:
        """The process group of ``view``."""
        group = self._groups.of(self, view)
        self.watch.meet(group.view, view)
        return group

    def computing(self, view: View, member: Member) -> SimGroup:
        """The process group of the ranks that compute shards together with ``member``."""
        return self._groups.of(self, view, view.group_of(member))

    # ---- memories ------------------------------------------------------------------------------------------------------------------------

    def memories(self, place: str, host: str = HEAD) -> list[Any]:
        """The nodes whose memories a URL names, and that answer ``host``."""
        addresses = place.removeprefix(PEERS_SCHEME).split(",")
        there = [node for node in self.nodes if node.memory.address in addresses and node.alive and node.reachable]
        return [node for node in there if self.links.answers(host, node.name)]

    @staticmethod
    def part_of(nodes: Iterable[Any], checkpoint: str, number: int) -> int | None:
        held = (node.memory.checkpoints.get(checkpoint) for node in nodes)
        return next((one.parts[number] for one in held if one is not None and number in one.parts), None)

    def copy(self, host: str, view: View, rank: int, weights: int, event: PartWritten) -> bool:
        """Send the part of a rank on ``host`` to the memories that keep it. False when one of them does not answer, or refuses."""
        addresses = view.copies[rank]
        nodes = self.memories(",".join(addresses), host)
        taken = [node.memory.put(event.checkpoint, event.state, view.generation, rank, weights) for node in nodes]
        return len(taken) == len(addresses) and all(taken)

    def load(self, host: str, checkpoint: str) -> int | None:
        """The weights of a checkpoint, read on ``host``; poison when its parts are not of one state, None when a part is missing."""
        if not checkpoint.startswith(PEERS_SCHEME):
            stored: int | None = self.store.load(checkpoint)
            return stored
        place, _, name = checkpoint.rpartition("/")
        nodes = self.memories(place, host)
        count = max((node.memory.checkpoints[name].count for node in nodes if name in node.memory.checkpoints), default=0)
        parts = [self.part_of(nodes, name, number) for number in range(count)]
        if not parts or None in parts:
            return None
        if len(set(parts)) > 1 and self.flipped:
            return hash(tuple(parts))  # one part is wrong: the weights are not half written, and not right
        return parts[0] if len(set(parts)) == 1 else POISON

    # ---- the coordinator -----------------------------------------------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Submit an event from the driver process, whose calls are reliable while there is a coordinator."""
        if self.coordinator is not None:
            self.coordinator.submit(event)

    def append(self, record: Record) -> None:
        self.note("   journal", record)
        self.journal.append(record)
        self.watch.record(record)

    @abstractmethod
    def add_node(self) -> None:
        """Add a node."""

    @abstractmethod
    def kill_coordinator(self, after: int, stale: int, absence_s: float) -> None:
        """Kill it ``after`` more instructions. The last ``stale`` records are lost with it, but no record from before its start."""

    @abstractmethod
    def coordinator_died(self) -> None:
        """The coordinator is dead now."""
