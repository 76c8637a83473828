"""A simulated rank process: clocks, channels and faults around the live ``RankMachine``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

from fleet.errors import Fenced, FleetError, GroupLost, RunOver
from fleet.protocol.events import Event, Raised
from fleet.protocol.instructions import Instruction, Keep, Quiesce
from fleet.protocol.lease import Lease
from fleet.protocol.member import MemberProtocol
from fleet.protocol.moves import Awaited, Drop, Form, KeepBeside, Move, Parting, Settle, Wait, Wake
from fleet.protocol.rank_machine import Moves, RankMachine
from fleet.protocol.slowness import RankTimes
from fleet.protocol.types import Member, Process, Pulse, StateId, View
from fleet.simulation.clockwork import Coroutine, Future, Steps
from fleet.simulation.groups import SimGroup
from fleet.simulation.model import POISON
from fleet.simulation.stage import Host, Stage


class Dead(Exception):
    """Unwinds the coroutine of a process that was killed in the middle of its own code."""


class UserError(Exception):
    """The train function raised."""


@dataclass(slots=True)
class Standstill:
    """A process is stopped since ``since_s`` (-1: it is not), and was until ``ended_s``; what ``waits`` until it goes on."""

    since_s: float = -1.0
    ended_s: float = -math.inf
    waits: list[Callable[[], None]] = field(default_factory=list)

    @property
    def lasts(self) -> bool:
        return self.since_s >= 0


@dataclass(slots=True)
class RankPace:
    """How many times as long as others a process takes, for its ``own`` work and on the ``link``; it was made ``slow`` at some time."""

    own: float = 1.0
    link: float = 1.0
    slow: bool = False


@dataclass(slots=True)
class TimedSteps:
    """What a process has measured of its whole steps of one view, and not yet said."""

    generation: int = -1
    rows: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Movement:
    """Where a process is, as its node's agent sees it: it steps, it is between two steps, and has moved last at ``at_s``."""

    at_s: float
    stepping: bool = False
    between: bool = False


class SimRank:
    """One process. ``where`` is (step, shard), as its node's agent would see it in the rank's shared memory.

    ``groups``: by generation, each that it has come to, and when it has formed.
    """

    def __init__(self, world: Stage, slot: int, node: Host, number: int, rng: random.Random) -> None:
        self.world, self.node, self.rng = world, node, rng
        self.protocol = MemberProtocol(slot, f"token-{number}", Process(node.name, 1000 + number, number), f"{node.name}:{number}")
        self.rank_machine = RankMachine(self.protocol)
        self.alive, self.still = True, Standstill()
        self.weights = POISON
        self.corrupt = False
        self.spoils = False  # the next gradient that it computes is not finite
        self.where = (-1, -1)
        self.hung = False
        self.movement = Movement(world.clock.now_s)
        self.started_s = world.clock.now_s
        self.pace, self.timed = RankPace(), TimedSteps()
        self.groups: dict[int, tuple[SimGroup, Future]] = {}
        self._joined_view: View | None = None
        self._news: list[Future] = []
        world.clock.after(rng.uniform(0.01, 0.3), lambda: self.gate(self._start))

    def __str__(self) -> str:
        return f"{self.protocol.slot}.{'?' if self.protocol.incarnation is None else self.protocol.incarnation}"

    @property
    def member(self) -> Member:
        return self.protocol.member

    @property
    def end(self) -> str:
        """Its end of all links."""
        return f"{self.node.name}/{self.protocol.token}"

    @property
    def named(self) -> bool:
        return self.protocol.incarnation is not None

    @property
    def responsive(self) -> bool:
        return not self.still.lasts and not self.hung

    # ---- the process as others see it ----------------------------------------------------------------------------------------------------

    def gate(self, call: Callable[[], None]) -> None:
        """Everything that happens in this process comes through here: not when it is dead, later when it is stopped."""
        if not self.alive:
            return
        if self.still.lasts:
            self.still.waits.append(call)
        else:
            call()

    def freeze(self) -> None:
        if self.alive and not self.still.lasts:
            self.still.since_s = self.world.clock.now_s
            self.world.note("freeze", self)

    def thaw(self) -> None:
        if not self.alive or not self.still.lasts:
            return
        calls, self.still = self.still.waits, Standstill(ended_s=self.world.clock.now_s)
        self.world.note("thaw", self)
        for call in calls:
            self.gate(call)

    def die(self, cause: str) -> None:
        """SIGKILL, or the end of the process: its ends of all groups close, its agent sees it."""
        if not self.alive:
            return
        self.alive = False
        self.world.note("dead", self, cause, self.where)
        self._leave_groups()
        self.node.on_death(self, cause)
        self.world.train.on_death(self)

    def pulse(self) -> Pulse:
        now_s, protocol = self.world.clock.now_s, self.protocol
        beat_age_s = now_s - self.still.since_s if self.still.lasts else 0.0
        state = protocol.state or StateId(0, 0)
        moved = self.movement
        return Pulse(self.member, protocol.generation, state, beat_age_s, now_s - moved.at_s, moved.stepping, moved.between)

    def take_times(self) -> RankTimes:
        """What it measured since it was asked last; nothing but whole steps of one view."""
        times, self.timed.rows = self.timed.rows, []
        return RankTimes(self.member, *zip(*times, strict=True))

    def _leave_groups(self) -> None:
        for generation in list(self.groups):
            self._leave_group(generation)

    def _leave_group(self, generation: int, graceful: bool = False) -> None:
        group, _ = self.groups.pop(generation)
        group.leave(self.member, graceful)

    # ---- messages ------------------------------------------------------------------------------------------------------------------------

    def receive(self, message: Instruction) -> None:
        self.gate(lambda: self._take(message))

    def alone(self) -> None:
        """Its agent is gone: as a live rank does, it leaves its view by itself."""
        if self.alive and self.named:
            self.receive(Quiesce((self.member,), self.protocol.generation))

    def _take(self, message: Instruction) -> None:
        self.rank_machine.receive(message)
        self._obey()
        self._wake()

    def _wake(self) -> None:
        """Whoever waits for news looks again."""
        news, self._news = self._news, []
        for future in news:
            future.resolve()

    def flush(self, *events: Event) -> None:
        """Send what the protocol has to say."""
        outbox, self.protocol.outbox = [*self.protocol.outbox, *events], []
        for event in outbox:
            self.node.from_rank(self, event)

    def reconnect(self) -> None:
        """The agent hung up: say hello again, and the last status."""
        self.gate(lambda: self.flush(self.protocol.hello(), *(self.protocol.status() if self.named else [])))

    def _repeat(self) -> None:
        if self.protocol.waits:
            self.flush(*self.protocol.status())
        self.world.clock.after(self.world.settings.timeouts.resend_s, lambda: self.gate(self._repeat))

    # ---- the rank machine ----------------------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        """Do what is to be done at once, and say what is to be said."""
        while self.rank_machine.orders:
            match self.rank_machine.orders.pop(0):
                case Form(formed):
                    group = self.world.group(formed)
                    self.groups[formed.generation] = group, group.arrive(self.member, self.world.settings.timeouts.form_s, self.end)
                case Settle(joining):
                    Coroutine(self.world.clock, self._beside(self.rank_machine.settle(joining)), self.gate)
                case Drop(generation, parting):
                    self._leave_group(generation, graceful=parting is Parting.AGREED and not self.world.plan.abrupt)
                case Wake(generation):
                    self.groups[generation][0].leave(self.member)
                case KeepBeside(order):
                    Coroutine(self.world.clock, self.keep_beside(order), self.gate)
        view = self.protocol.view
        if view is not self._joined_view and view is not None:
            self.world.watch.joining(self, view)
        self._joined_view = view
        self.flush()

    def _beside(self, moves: Moves) -> Steps:
        """In a thread of its own."""
        try:
            yield from self.carry(moves)
        except Dead:
            return
        self._wake()

    def carry(self, moves: Moves) -> Steps:
        """Carry out one move after the other; gives what ``moves`` come to."""
        value, lost = None, None
        while True:
            try:
                move = moves.send(value) if lost is None else moves.throw(lost)
            except StopIteration as end:
                return end.value
            finally:
                self._obey()
            value = lost = None
            if not self.alive:  # killed beside the loop, at a point of its own
                raise Dead
            try:
                value = yield from self._perform(move)
            except GroupLost as error:
                lost = error

    def _perform(self, move: Move) -> Steps:
        done = self.carriers[type(move)](move)
        return (yield from done) if isinstance(done, GeneratorType) else done

    def _wait(self, move: Wait) -> Steps:
        late_s = math.inf
        if move.again_s is not None:
            late_s = self.world.clock.now_s + move.again_s
            self.world.clock.after(move.again_s, lambda: self.gate(self._wake))
        while True:
            if self.protocol.fenced is not None:
                raise Fenced(self.protocol.fenced)
            if move.until() or self.world.clock.now_s >= late_s:
                return
            if move.what is Awaited.BARRIER and self.at("finished"):
                yield self._pause()
            yield self._next_message()

    def _next_message(self) -> Future:
        """Resolves with the next message."""
        future = Future()
        self._news.append(future)
        return future

    # ---- the process ---------------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.flush(self.protocol.hello())
        self.world.clock.after(self.world.settings.timeouts.resend_s, lambda: self.gate(self._repeat))
        Coroutine(self.world.clock, self._main(), self.gate)

    def at(self, point: str) -> bool:
        """A named point of the loop, at which faults can be aimed. True when the process was stopped: yield once."""
        if self.world.faults.at(self, point):
            if not self.alive:
                raise Dead
            return self.still.lasts or self.hung
        return False

    def _pause(self) -> Future | float:
        """What to wait for after a stop: for ever when the user's code hangs, which neither beats nor interrupts can tell."""
        return Future() if self.hung else 0.0

    def _main(self) -> Steps:
        try:
            yield from self._live()
            self.die("exited")
        except (RunOver, Fenced):
            self.die("exited")
        except (UserError, FleetError) as error:
            step, shard = self.where
            self.flush(Raised(self.member, step, shard, str(error), "traceback of the user's code"))
            yield 0.01
            self.die("exited after an error")
        except Dead:
            return

    def _live(self) -> Steps:
        while not self.named:
            if self.rank_machine.over or self.protocol.fenced is not None:
                return
            yield self._next_message()
        if self.at("building"):
            yield self._pause()
        yield self.rng.uniform(*self.world.plan.build_s)
        if self.rank_machine.over or self.protocol.fenced is not None:
            return
        if not (yield from self.carry(self.rank_machine.run())):
            return
        self.world.watch.behind(self)
        if self.at("behind"):
            yield self._pause()
        lease = Lease(self.rank_machine, self.world.settings.timeouts.resend_s)
        yield from self.carry(lease.do("end/save"))  # the code behind the loop: one of the ranks writes the model
        yield from self.carry(self.rank_machine.close())

    def keep_beside(self, order: Keep) -> Steps:
        """Write its part of the state that it holds, whatever its loop does."""
        raise NotImplementedError

    # ---- what it does in a view: see fleet.simulation.steps ------------------------------------------------------------------------------

    @property
    def carriers(self) -> dict[type[Move], Callable[[Any], Any]]:
        """How each move is carried out."""
        raise NotImplementedError
