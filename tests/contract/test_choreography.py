"""The choreography's two drivers, the live seat and the simulated rank: told the same, both do the same and say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors.rank.client import Client
from actors.rank.engine import Engine
from actors.rank.process_group import StoreServer
from actors.rank.recorder import Recorder
from actors.rank.saving import PartsPort
from actors.rank.seat import Seat
from actors.rank.state import TrackedState
from fleet import moves
from fleet.choreography import Choreography
from fleet.config import RunSettings, Timeouts
from fleet.errors import RunOver
from fleet.events import Event, Formed, OnceDone, OnceWanted, Parked, Ready
from fleet.instructions import Instruction, OnceAnswer, Park, Propose, Publish, Release, Welcome
from fleet.lease import Lease
from fleet.moves import CarryOut, Compute, Move
from fleet.simulation.clockwork import Coroutine
from fleet.simulation.plan import Plan, small
from fleet.simulation.steps import SteppingRank
from fleet.simulation.world import World
from fleet.types import Member, StateId, View
from tests.simulation.runs import make_machine
from tests.support.waiting import until

ME, PEER = Member(0, 0), Member(1, 0)
START = StateId(0, 0)


class Driver:
    """What the suite needs of a driver: words go in, and what it says and is asked for comes out."""

    choreography: Choreography
    store: str

    def hear(self, *messages: Instruction) -> None:
        """As from the coordinator."""
        raise NotImplementedError

    def run(self) -> None:
        """Until it waits for words, or is asked to compute."""
        raise NotImplementedError

    def lease(self, key: str) -> object:
        """What comes of something that is done once; "over" where the run ends. Called once the words that it needs were heard."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what it holds."""

    def __init__(self) -> None:
        self.said: list[Event] = []
        self.asked: list[type[Move]] = []


class Halt(Exception):
    """The script has come to the end of what it has words for."""


class LiveDriver(Driver):
    """The seat of a live rank, with real groups and no coordinator."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._server = StoreServer("127.0.0.1")
        self.store = self._server.address
        self._recorder = Recorder(folder / "ring", 0)
        client = self._client = Client(0, "token-1", "node", str(folder / "nobody"), self.store, self._recorder)
        client.say = self._say  # type: ignore[method-assign]
        self._seat = Seat(client, self._recorder, cast("PartsPort", SimpleNamespace()), "127.0.0.1", Timeouts())
        self.choreography = self._seat.choreography
        model = torch.nn.Linear(2, 1)
        state = TrackedState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        self._engine = Engine(state, RunSettings(world=2, shards=8), self._recorder, None)
        self._seat.serve(state, self._engine, 3)
        self._seat.carriers |= {moves.Hold: lambda move: self._engine.hold(), moves.Reset: lambda move: self._engine.reset()}
        self._seat.carriers |= {moves.Share: self._share, moves.Seated: lambda move: None, moves.CarryOut: lambda move: '"did"'}
        self._steps = self.choreography.run()

    def _say(self, event: Event | None = None) -> None:
        self.said += self._client.protocol.outbox
        self._client.protocol.outbox = []

    def _share(self, move: moves.Share) -> None:
        self._seat.joined()
        self._engine.seat(self._seat.group, move.view, move.view.rank_of(ME), self.choreography.here, move.begun)

    def hear(self, *messages: Instruction) -> None:
        with self._client.lock:
            self._client.on_messages(messages)
            self._client.changed.notify_all()

    def run(self) -> None:
        value: Any = None
        while True:
            ended, move = self._seat.resume(self._steps, value)
            if ended:
                return
            self.asked.append(type(move))
            if isinstance(move, Compute):
                return
            if isinstance(move, moves.Wait) and not move.until():
                self._waits = move
                until(move.until, "words that it waits for", 20.0)
            value = None if isinstance(move, moves.Rehearse) else self._seat.carriers[type(move)](move)

    def lease(self, key: str) -> object:
        try:
            return self._seat.carry(Lease(self.choreography, 0.01).do(key))
        except RunOver:
            return "over"

    def close(self) -> None:
        self._server.close()


class SimulatedDriver(Driver):
    """A simulated rank in a world without a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        settings = small(world=2)
        self._world = World(Plan(seed=1, settings=settings, steps=3), make_machine)
        self._world.add_node()
        node = self._world.nodes[0]
        self._rank = rank = SteppingRank(self._world, 0, node, 1, self._world.stream("rank"))
        self.choreography, self.store = rank.choreography, rank.protocol.store
        node.from_rank = lambda rank, event: self.said.append(event)  # type: ignore[method-assign]
        self._begun = False
        self._computes = False
        right = rank._perform

        def perform(move: Move) -> Any:
            self.asked.append(type(move))
            if isinstance(move, Compute):
                raise Halt
            return right(move)

        rank._perform = perform  # type: ignore[method-assign]
