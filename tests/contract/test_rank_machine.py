"""The rank machine's two drivers, the live seat and the simulated rank: told the same, both do the same and say the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors.rank.membership.client import Client
from actors.rank.membership.membership import Membership
from actors.rank.state.saving import PartsPort
from actors.rank.state.tracked import TrackedState
from actors.rank.step.outcome import ReductionOutcome
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from fleet.errors import RunOver
from fleet.protocol import moves
from fleet.protocol.events import Event, Finished, Formed, Joined, Left, OnceDone, OnceWanted, Quiesced, Ready
from fleet.protocol.instructions import Conclude, Halt, Instruction, OnceAnswer, Propose, Publish, Quiesce, Release, Welcome
from fleet.protocol.lease import Lease
from fleet.protocol.member import Offer
from fleet.protocol.moves import Compute, Move, Wait
from fleet.protocol.rank_machine import Moves, RankMachine
from fleet.protocol.types import Member, StateId, View
from fleet.protocol.vote import Words
from fleet.settings.run import RunSettings, Timeouts
from fleet.simulation.clockwork import Coroutine, Future, Steps
from fleet.simulation.nodes import SimNode
from fleet.simulation.plan import Plan, small
from fleet.simulation.ranks import SimLayout, SimRank
from fleet.simulation.steps import SimStep
from fleet.simulation.world import World
from tests.simulation.runs import make_machine

ME = Member(0, 0)
TOTAL, KEY = 2, "end/save#1"


class Driver:
    """What the suite needs of a driver. ``said`` holds each thing that was said once, ``asked`` every move."""

    rank_machine: RankMachine

    def __init__(self) -> None:
        self.said: list[Event] = []
        self.asked: list[type[Move]] = []
        self.came: list[str] = []

    def receive(self, *messages: Instruction) -> None:
        """As from the coordinator; returns when everything waits for words, or for the loop body."""
        raise NotImplementedError

    def computed(self) -> None:
        """The loop body comes to its commit; returns as ``receive`` does."""
        raise NotImplementedError

    def overflow(self) -> None:
        """Something of the sum that comes next is not finite."""
        raise NotImplementedError

    def lease(self, key: str) -> None:
        """The train function does something once; what comes of it is in ``came``, "over" where the run ends."""
        raise NotImplementedError

    def say(self, event: Event) -> None:
        """Words are repeated while a rank waits, and digests are those of other models."""
        if isinstance(event, Finished | Left):
            event = dataclasses.replace(event, digest="")
        if not isinstance(event, Joined) and event not in self.said:
            self.said.append(event)


class LiveDriver(Driver):
    """The seat of a live rank, with groups of its own and no coordinator. Each generator stops where it would wait."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        recorder = Recorder(folder / "ring", 0)
        self._client = client = Client(0, "token-1", "node", str(folder / "nobody"), "nowhere:1", recorder)
        client.say = self._flush  # type: ignore[method-assign]
        self._membership = membership = Membership(client, recorder, cast("PartsPort", SimpleNamespace()), "127.0.0.1", Timeouts())
        self.rank_machine = membership.rank_machine
        model = torch.nn.Linear(2, 1)
        state = TrackedState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        self._train_step = train = TrainStep(state, RunSettings(world=1, shards=8), recorder, None)
        membership.serve(state, train, TOTAL)
        for kind in (moves.Hold, moves.Reset, moves.ViewJoined, moves.StepCommitted, moves.Expect, moves.Rehearse, moves.Attempted):
            membership.carriers[kind] = lambda move: None
        membership.carriers |= {moves.AssignShards: self._share, moves.Reduce: self._reduce, moves.Apply: self._apply}
        membership.carriers |= {moves.Digest: lambda move: "digest", moves.CarryOut: lambda move: '"did"'}
        membership.carriers |= {moves.CastVote: self._cast_vote, moves.Repeat: train.repeat}
        self._main, self._other = self._play(self.rank_machine.run()), iter(())
        self._now, self._finite = False, True

    def _flush(self, event: Event | None = None) -> None:
        spoken, self._client.protocol.outbox = self._client.protocol.outbox, []
        for each in spoken:
            self.say(each)

    def _share(self, move: moves.AssignShards) -> None:
        self._membership.joined()
        column = move.view.column_of(self.rank_machine.protocol.member)
        self._train_step.join(self._membership.groups.column, column, 0, self.rank_machine.here, move.begun)

    def _reduce(self, move: moves.Reduce) -> ReductionOutcome:
        offers: list[Offer] = [move.offer]
        return ReductionOutcome(offers, 0.0, None)

    def _cast_vote(self, move: moves.CastVote) -> Words:
        said, self._finite = Words((self._finite,)), True
        return said

    def _apply(self, move: moves.Apply) -> None:
        here = self.rank_machine.here
        self._train_step.duties.at = StateId(here.history, here.step + 1)

    def _play(self, steps: Moves) -> Iterator[None]:
        """Yields where there is something to wait for."""
        value: Any = None
        while True:
            ended, move = self._membership.resume(steps, value)
            if ended:
                return
            self.asked.append(type(move))
            while isinstance(move, Wait) and move.what is not moves.Awaited.SETTLED and not move.until():
                yield
            if isinstance(move, Compute):
                self._now = False
                while not self._now:
                    yield
            value = self._membership.carriers[type(move)](move) if not isinstance(move, Compute) else None

    def _go_on(self) -> None:
        for thread in list(self._membership._settling.values()):
            thread.join(20.0)
        if self._client.protocol.incarnation is not None:
            next(self._other, None)
            next(self._main, None)

    def receive(self, *messages: Instruction) -> None:
        with self._client.lock:
            self._client.on_messages(messages)
        self._go_on()

    def computed(self) -> None:
        self._now = True
        self._go_on()

    def overflow(self) -> None:
        self._finite = False

    def lease(self, key: str) -> None:
        def ask() -> Moves:
            try:
                self.came.append((yield from Lease(self.rank_machine, 0.5).do(key)))
            except RunOver:
                self.came.append("over")

        self._other = self._play(ask())
        self._go_on()


class SimulatedDriver(Driver):
    """A simulated rank, in a world without a coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self._world = world = World(Plan(seed=1, settings=small(world=1), steps=TOTAL), make_machine)
        node = SimNode(world, 0, 1)
        self._rank = rank = SimRank(world, 0, node, 1, world.stream("rank"), SimLayout)
        SimStep(rank)
        self.rank_machine = rank.rank_machine
        node.from_rank = lambda rank, event: self.say(event)  # type: ignore[method-assign]
        self._body = Future()
        right = rank._perform

        def perform(move: Move) -> Steps:
            self.asked.append(type(move))
            if isinstance(move, Compute):
                self._body = Future()
                yield self._body
            return (yield from right(move))

        rank._perform = perform  # type: ignore[method-assign]
        rank.carriers[moves.CarryOut] = lambda move: '"did"'
        rank._live = self._live  # type: ignore[method-assign]
        self._pass_time()

    def _live(self) -> Steps:
        """As its own, without code behind the loop: that is the suite's."""
        while not self._rank.named:
            yield self._rank._next_message()
        yield from self._rank.carry(self.rank_machine.run())
        yield Future()

    def _pass_time(self) -> None:
        self._world.clock.run(self._world.clock.now_s + 3.0, lambda: False)

    def receive(self, *messages: Instruction) -> None:
        for message in messages:
            self._rank.receive(message)
        self._pass_time()

    def computed(self) -> None:
        self._body.resolve()
        self._pass_time()

    def overflow(self) -> None:
        self._rank.spoils = True

    def lease(self, key: str) -> None:
        def ask() -> Steps:
            try:
                self.came.append((yield from self._rank.carry(Lease(self.rank_machine, 0.5).do(key))))
            except RunOver:
                self.came.append("over")

        Coroutine(self._world.clock, ask(), self._rank.gate)
        self._pass_time()


@pytest.fixture(params=["live", "simulated"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    """Welcomed, and built."""
    made: Driver = LiveDriver(tmp_path) if request.param == "live" else SimulatedDriver()
    made.receive(Welcome(0, "token-1", 0))
    return made


def view(generation: int, step: int = 0) -> View:
    return View(generation, (ME,), ((0, 8),), 0, (), StateId(0, step), "nowhere:1")


def joined(driver: Driver) -> None:
    driver.receive(Publish(view(1)))
    assert driver.said == [Ready(ME), Formed(ME, 1, StateId(0, 0))]
    assert driver.asked[-1] is Compute
    driver.said.clear()


def quiesced(driver: Driver) -> list[tuple[int, StateId | None, bool]]:
    return [(event.generation, event.state, event.dirty) for event in driver.said if isinstance(event, Quiesced)]


def test_it_sits_down_in_the_same_order(driver: Driver) -> None:
    joined(driver)
    kinds = [moves.Rehearse, moves.Hold, moves.Wait, moves.Meet, moves.Begin, moves.AssignShards, moves.ViewJoined, moves.Compute]
    assert driver.asked == kinds


def test_whoever_listens_answers_for_a_loop_that_computes_and_takes_its_next_seat(driver: Driver) -> None:
    joined(driver)
    driver.receive(Quiesce((ME,), 1))
    assert quiesced(driver) == [(1, StateId(0, 0), False)]
    driver.receive(Publish(view(2)))
    assert driver.said[-1] == Formed(ME, 2, StateId(0, 0))
    assert driver.asked[-1] is not moves.AssignShards, "the loop has not come"


def test_a_loop_that_is_called_in_person_answers_itself(driver: Driver) -> None:
    joined(driver)
    driver.receive(Quiesce((ME,), 1, in_person=True))
    assert not driver.said and driver.rank_machine.wanted
    driver.computed()
    assert quiesced(driver) == [(1, StateId(0, 0), False)]
    assert driver.asked[-3:] == [moves.Hold, moves.Clear, moves.Wait] and not driver.rank_machine.claim()


def test_a_step_whose_sum_is_not_finite_is_computed_anew_and_then_taken(driver: Driver) -> None:
    joined(driver)
    driver.overflow()
    driver.computed()
    assert driver.asked[-6:] == [moves.Reduce, moves.HoldStill, moves.CastVote, moves.Repeat, moves.Attempted, Compute]
    assert driver.rank_machine.here == StateId(0, 0) and not driver.rank_machine.vote.keeps
    driver.computed()
    assert driver.rank_machine.here == StateId(0, 1) and driver.rank_machine.duties.at == StateId(0, 1)


def test_a_proposal_is_formed_beside_and_entered_after_the_step(driver: Driver) -> None:
    joined(driver)
    driver.receive(Propose(view(3)))
    assert driver.rank_machine.membership == view(1) and driver.rank_machine.ahead == view(3) and not driver.said
    driver.computed()
    assert driver.said == [Formed(ME, 3, StateId(0, 1))]
    assert driver.rank_machine.membership == view(3)


def test_after_the_last_step_it_waits_at_the_barrier_and_is_called_behind_the_loop(driver: Driver) -> None:
    joined(driver)
    driver.computed()
    driver.computed()
    assert driver.said == [Finished(ME, 1, StateId(0, TOTAL), "")]
    driver.receive(Conclude((ME,), 1))
    assert driver.rank_machine.protocol.concluded


def test_a_rank_that_halts_waits_at_the_barrier_and_goes_on_when_it_is_called_again(driver: Driver) -> None:
    joined(driver)
    driver.receive(Halt((ME,), 1))
    driver.computed()
    assert driver.said == [Finished(ME, 1, StateId(0, 1), "", halted=True)]
    driver.receive(Quiesce((ME,), 1), Publish(view(2)))
    assert driver.asked.count(Compute) == 2
    driver.computed()
    driver.computed()
    assert driver.said[-1] == Finished(ME, 2, StateId(0, TOTAL), "")


def test_what_is_done_once_is_done_by_who_is_told_to(driver: Driver) -> None:
    joined(driver)
    driver.lease(KEY)
    assert driver.said == [OnceWanted(ME, KEY)] and not driver.came
    driver.receive(OnceAnswer((ME,), KEY, None))
    assert driver.said[-1] == OnceDone(ME, KEY, '"did"') and not driver.came
    driver.receive(OnceAnswer((ME,), KEY, '"another did"'))
    assert driver.came == ['"another did"'], "the coordinator's word counts"


def test_a_release_ends_every_wait(driver: Driver) -> None:
    joined(driver)
    driver.lease(KEY)
    driver.receive(Release((ME,), "stopped"))
    assert driver.rank_machine.over and driver.came == ["over"]
    driver.computed()
    assert not driver.rank_machine.claim()
