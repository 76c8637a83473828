"""What ranks, nodes, the coordinator and the checkers see of the simulated world that they are in.

``fleet.simulation.world.World`` is made of all of them, and each of them looks at it: they name this instead, so that no two modules need
each other. What a part of the world is made of is known where it is made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fleet.machine.core import FleetMachine
from fleet.protocol.events import Event, PartWritten
from fleet.protocol.instructions import EndRun
from fleet.protocol.records import Record, RunEnded
from fleet.protocol.types import StateId, View
from fleet.settings.run import RunSettings
from fleet.simulation.clockwork import Clockwork
from fleet.simulation.groups import SimGroup
from fleet.simulation.links import HEAD, Links
from fleet.simulation.model import Chain
from fleet.simulation.plan import Plan


class Host(Protocol):
    """The node that a rank is on, as the rank knows it."""

    name: str
    domain: str
    alive: bool
    from_rank: Callable[..., None]
    on_death: Callable[..., None]

    @property
    def reachable(self) -> bool:
        """Whether the coordinator can talk to it."""


class Stage(Protocol):
    """The world, as those in it know it. ``train`` is what starts processes anew; ``watch`` has a method for each hook of a checker."""

    plan: Plan
    clock: Clockwork
    chain: Chain
    journal: list[Record]
    links: Links
    network: Any
    store: Any
    watch: Any
    nodes: Any
    train: Any
    faults: Any
    coordinator: Any
    ended: EndRun | RunEnded | None
    flipped: bool
    excused: bool
    unseen: set[StateId]

    @property
    def settings(self) -> RunSettings:
        """The plan's."""
        ...

    @property
    def over(self) -> bool:
        """The run has ended."""

    def stream(self, *path: object) -> random.Random:
        """Random numbers of their own for who names itself so."""

    def note(self, *words: Any) -> None:
        """A line of the trace."""

    def make_machine(self) -> FleetMachine:
        """Another life of the coordinator."""

    def reachable(self) -> Any:
        """The ranks that run, and that the coordinator could talk to."""

    def end(self, end: EndRun | RunEnded) -> None:
        """The coordinator has ended the run."""

    def add_node(self) -> None:
        """A node more."""

    def group(self, view: View) -> SimGroup:
        """The process group in which the members of ``view`` meet."""

    def memories(self, place: str, host: str = HEAD) -> Any:
        """The nodes in whose memory the copies of ``place`` are, as far as they answer to ``host``."""

    def part_of(self, nodes: Iterable[Any], checkpoint: str, number: int) -> int | None:
        """The weights in one part of a checkpoint in memory."""

    def copy(self, host: str, view: View, rank: int, weights: int, event: PartWritten) -> bool:
        """Put a rank's part where its view has copies."""

    def load(self, host: str, checkpoint: str) -> int | None:
        """The weights in a checkpoint."""

    def submit(self, event: Event) -> None:
        """Tell the coordinator, if it lives."""

    def append(self, record: Record) -> None:
        """Write to the journal."""

    def kill_coordinator(self, after: int, stale: int, absence_s: float) -> None:
        """Its death is near."""

    def coordinator_died(self) -> None:
        """It is dead now."""
