"""The store of the simulated world, and the memories of its nodes: checkpoints, and troubles of access to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fleet.errors import FleetError
from fleet.protocol.events import CheckpointDurable, CheckpointFailed, Event
from fleet.protocol.instructions import CommitCheckpoint
from fleet.protocol.levels import PEERS, level_at
from fleet.protocol.types import Copy, StateId
from fleet.simulation.clockwork import Future
from fleet.simulation.links import HEAD, STORE
from fleet.simulation.stage import Stage

PATIENCE_S = 2.0
"""Seconds without an answer after which a process gives up its request to the store."""


class StoreFails(FleetError):
    """A rank cannot read a checkpoint: the store refuses, or does not answer."""


class Asker(Protocol):
    """The store's interface to the coordinator. All calls of its process pass through ``gate``."""

    def gate(self, call: Callable[[], None]) -> None:
        """Run ``call`` now, or once the process goes on."""

    def submit(self, event: Event) -> None:
        """Report the result of a checkpoint."""


class Store:
    """Ranks put parts, and a commit makes one checkpoint of them. It fails when they do not belong together.

    The store may fail, refuse, be out of reach, or be slow. A request may still arrive after its sender has given it up.

    Attributes:
        failing_until_s, refusing_until_s: until then the store takes no part; a store that refuses gives none, either.
        slow_s: most additional seconds of each request, until ``slow_until_s``.
    """

    def __init__(self, world: Stage, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.failing_until_s = self.refusing_until_s = self.slow_until_s = -1.0
        self.slow_s = 0.0
        self._trouble = world.stream("store trouble")
        self._parts: dict[tuple[str, int], int] = {}
        self._committed: dict[str, int] = {}

    @property
    def refusing(self) -> bool:
        return self.world.clock.now_s < self.refusing_until_s

    @property
    def failing(self) -> bool:
        return self.world.clock.now_s < self.failing_until_s or self.refusing

    def holds(self, name: str) -> int | None:
        """The weights of a committed checkpoint; None when there is none of this name."""
        return self._committed.get(name)

    # ---- requests ------------------------------------------------------------------------------------------------------------------------

    def _ask(self, end: str, act: Callable[[], None], done: Callable[[bool], None]) -> None:
        """Do ``act`` at the store for ``end``. ``done`` gets whether ``end`` has the store's answer."""
        slow = self.world.clock.now_s < self.slow_until_s
        if not slow and self.world.links.answers(end, STORE):
            act()
            done(True)
            return
        answered = Future()
        answered.on_done = lambda future: done(future.value)
        self.world.clock.after(PATIENCE_S, lambda: answered.resolve(False))
        late_s = self._trouble.uniform(0.0, self.slow_s) if slow else 0.0
        self.world.clock.after(late_s, lambda: self.world.links.deliver(STORE, (end,), lambda: self._arrive(end, act, answered)))

    def _arrive(self, end: str, act: Callable[[], None], answered: Future) -> None:
        if answered.done and self._trouble.random() < 0.5:
            return  # its connection was reset
        if self.refusing:
            answered.resolve(False)
            return
        act()
        self.world.links.deliver(end, (STORE,), lambda: answered.resolve(True))

    def put(self, end: str, name: str, rank: int, weights: int, done: Callable[[bool], None]) -> None:
        """Put one rank's part."""
        if self.failing:
            done(False)
            return
        self._ask(end, lambda: self._parts.__setitem__((name, rank), weights), done)

    def load(self, checkpoint: str) -> int:
        return self._committed[checkpoint.rpartition("/")[2]]

    def read(self, end: str) -> Future | None:
        """None when a checkpoint can be read at once; else a future that resolves once it can, with :class:`StoreFails` when it cannot."""
        if not self.refusing and self.world.clock.now_s >= self.slow_until_s and self.world.links.answers(end, STORE):
            return None
        future = Future()
        if self.refusing:
            future.resolve(error=StoreFails("it refuses"))
        else:
            self._ask(end, lambda: None, lambda done: future.resolve(error=None if done else StoreFails("it does not answer")))
        return future

    # ---- the coordinator's half ----------------------------------------------------------------------------------------------------------

    def perform(self, order: CommitCheckpoint, coordinator: Asker) -> None:
        self.world.clock.after(self.rng.uniform(0.02, 0.5), lambda: coordinator.gate(lambda: self._commit(order, coordinator)))

    def _commit(self, order: CommitCheckpoint, coordinator: Asker) -> None:
        if level_at(order.place) == PEERS:
            self._report(order, coordinator, self._commit_in_memory(order))
            return
        self.world.watch.checkpoint(order, self._parts_of(order))
        if self.failing:
            self._report(order, coordinator, False)
        else:
            self._ask(HEAD, lambda: self._keep(order), lambda done: coordinator.gate(lambda: self._report(order, coordinator, done)))

    def _report(self, order: CommitCheckpoint, coordinator: Asker, done: bool) -> None:
        level = level_at(order.place)
        if not done:
            coordinator.submit(CheckpointFailed(order.checkpoint, f"the {level} fails", level))
            return
        latency_s = self.world.clock.now_s - order.requested_at_s
        coordinator.submit(CheckpointDurable(order.checkpoint, order.state, len(order.parts), order.blocked_s, latency_s, level))

    def _parts_of(self, order: CommitCheckpoint) -> list[int | None]:
        return [self._parts.get((order.checkpoint, rank)) for rank in range(len(order.parts))]

    def _keep(self, order: CommitCheckpoint) -> None:
        parts = self._parts_of(order)
        if parts[0] is not None:
            right = self.world.chain.weights(order.state.step)
            self._committed[order.checkpoint] = next((part for part in parts if part is not None and part != right), right)

    def _commit_in_memory(self, order: CommitCheckpoint) -> bool:
        """Commit in all memories of the place. All of them have to answer, and every part has to be in one of them."""
        nodes = self.world.memories(order.place)
        generation = int(order.checkpoint.rpartition("-g")[2])
        parts = [self.world.part_of(nodes, order.checkpoint, number) for number in range(len(order.parts))]
        if len(nodes) < order.place.count(",") + 1 or None in parts:
            return False
        self.world.watch.checkpoint(order, parts)
        for node in nodes:
            node.memory.commit(order.checkpoint, order.state, generation, len(parts))
        return True


@dataclass(slots=True)
class Held:
    """The parts of one checkpoint in a memory, by number. ``count``: the number of all its parts, once it is committed."""

    state: StateId
    generation: int
    parts: dict[int, int] = field(default_factory=dict)
    count: int = 0


class SimMemory:
    """Two checkpoints at most: the newest committed one, and the one being written."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.checkpoints: dict[str, Held] = {}
        self._fence = (-1, -1)

    def put(self, name: str, state: StateId, generation: int, part: int, weights: int) -> bool:
        """Put a part. False for a writer of an overtaken view."""
        if (state.history, generation) < self._fence:
            return False
        self._fence = (state.history, generation)
        if name not in self.checkpoints:
            self._make_room()
            self.checkpoints[name] = Held(state, generation)
        self.checkpoints[name].parts[part] = weights
        return True

    def _make_room(self) -> None:
        order = sorted(self.checkpoints, key=lambda name: (self.checkpoints[name].state, self.checkpoints[name].generation))
        committed = [name for name in order if self.checkpoints[name].count]
        spared = committed[-1:] or order[-1:]
        self.checkpoints = {name: self.checkpoints[name] for name in spared}

    def commit(self, name: str, state: StateId, generation: int, count: int) -> None:
        self.checkpoints.setdefault(name, Held(state, generation)).count = count

    def held(self) -> tuple[Copy, ...]:
        return tuple(
            Copy(name, held.state, tuple(sorted(held.parts)), held.count) for name, held in sorted(self.checkpoints.items())
        )  # fmt: skip
