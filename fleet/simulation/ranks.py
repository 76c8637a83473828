"""A simulated rank: its process, with clocks, channels and faults around the live ``RankMachine``, and the layout of what it holds.

Its steps are in :mod:`fleet.simulation.steps`. Layouts of a state that is spread are in :mod:`fleet.simulation.sharded` and
:mod:`fleet.simulation.gathering`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

from fleet.errors import Fenced, FleetError, GroupLost, LoopError, RunOver
from fleet.protocol.chunks import Claim
from fleet.protocol.events import Event, Raised
from fleet.protocol.instructions import Instruction, Quiesce
from fleet.protocol.layouts import LAYOUTS
from fleet.protocol.lease import Lease
from fleet.protocol.member import MemberProtocol
from fleet.protocol.moves import Awaited, Begin, Drop, Form, KeepBeside, Move, Parting, Settle, Wait, Wake
from fleet.protocol.rank_machine import Moves, RankMachine
from fleet.protocol.slowness import RankTimes
from fleet.protocol.types import Column, Member, Process, Pulse, StateId, View
from fleet.simulation.clockwork import Coroutine, Future, Steps, Stoppable
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import POISON, SPOILED
from fleet.simulation.stage import Host, Stage


class Dead(Exception):
    """Unwinds the coroutine of a process that was killed in the middle of its own code."""


class UserError(Exception):
    """The train function raised."""


@dataclass(slots=True)
class RankPace:
    """How many times as long as others a process takes, for its ``own`` work and on the ``link``, and for its work while it waits for cores
    that its ``machine`` has not; it was made ``slow`` at some time."""

    own: float = 1.0
    link: float = 1.0
    machine: float = 1.0
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


class SimLayout:
    """What a simulated rank holds, as :class:`actors.rank.step.layout.StateLayout` has it; this one is of whole replicas.

    A layout of a state that is spread overrides what is otherwise there.

    Attributes:
        weights: stands for the parameters; poison while they are incomplete.
        corrupt: a bit has flipped in it, which no rank knows.
        held: by shard, what this rank has computed of the step at hand.
        kept: the chunks of a state that is spread, see :class:`fleet.simulation.sharded.SimChunks`; None of whole replicas.
        useless: why a shard that is computed now does not count; empty while it does.
    """

    weights = POISON
    corrupt = False
    kept: Any = None
    useless = ""
    spares_newcomers = True

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.held: dict[int, int] = {}

    def reset(self) -> None:
        """Nothing of the present attempt remains."""
        self.held = {}

    def counts(self, shards: Collection[int]) -> list[int]:
        """Of shards that this rank has, or goes on with, those that count in a view that begins within their step."""
        return sorted(shards)

    def begin(self, move: Begin) -> Steps:
        """All of the view's state was loaded or built here."""
        if move.loaded is None:
            self.weights = self.rank.world.chain.weights(0)
            return
        self.weights = POISON
        yield self.rank.rng.uniform(0.02, 0.3)
        self.weights = move.loaded

    # ---- a state that is given or received -----------------------------------------------------------------------------------------------

    def post(self, group: SimGroup, state: StateId, given: Future) -> Steps:
        """Give ``state`` to the receivers of the view."""
        rank = self.rank
        if self.corrupt and len(group.view.receivers) == len(group.view.members) - 1:
            rank.world.excused = True  # the only one that holds this state: nobody can tell
        group.post_state((state, self.weights))
        try:
            yield from rank.point("donating")
        except Dead:
            return
        yield rank.rng.uniform(0.02, 0.2)
        broken = group.broken_for(rank.member)
        given.resolve(error=Broken(broken) if broken is not None else None)

    def put_in_place(self, group: SimGroup, state: StateId, weights: int) -> Steps:
        """The state that was received takes the place of the old one. Raises Broken."""
        rank, self.weights = self.rank, POISON
        yield from rank.point("receiving")
        yield rank.rng.uniform(0.02, 0.25)
        if (broken := group.broken_for(rank.member)) is not None:
            raise Broken(broken)
        yield from rank.point("received")
        self.weights = weights
        self.corrupt = rank.world.flipped and weights != rank.world.chain.weights(state.step)

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def parameters(self) -> Steps:
        """From which a shard is computed. None: they cannot be had."""
        yield from ()
        return self.weights

    def look_again(self) -> None:
        """This rank has left its view: what others wait for here may not come."""

    def evaluate(self) -> Steps:
        """Between two steps this rank alone needs all parameters."""
        yield from ()

    def flush(self) -> None:
        """Raises Broken where what this rank has computed does not count."""

    def word(self, sums: Mapping[int, int]) -> bool:
        """Whether all is finite that this rank has summed, of what ``sums`` has by shard."""
        return SPOILED not in sums.values()

    def take_out(self) -> int:
        """The state is about to change. Gives the old one."""
        before, self.weights = self.weights, POISON
        return before

    def put_back(self, value: int, at: StateId) -> None:
        """It has changed, to ``value`` at the state ``at``."""
        self.weights = value

    def followed(self) -> None:
        """The step was taken behind others."""

    def publish(self) -> Steps:
        """Bring what others need of the step to them. Raises Broken."""
        yield from ()
        self.rank.world.watch.commit(self.rank, self.rank.rank_machine.here)

    # ---- a view begins, where chunks of the state move -----------------------------------------------------------------------------------

    def moving(self) -> AbstractContextManager[None]:
        """Around what changes what is held here."""
        return nullcontext()

    def gather(self, group: SimGroup, there: Sequence[Claim]) -> Steps:
        """Bring the parameters to all who keep them whole. Raises Broken."""
        yield from ()

    def introduce(self, group: SimGroup) -> Steps:
        """The members of a view are about to be placed: what they have to know of each other for it. Raises Broken."""
        yield from ()

    def place(self, column: Column, guarded: Sequence[Sequence[int]]) -> None:
        """The chunks of the view are here."""

    def died(self) -> None:
        """The process is gone."""


class SimRank:
    """One process. ``where`` is (step, shard), as its node's agent would see it in the rank's shared memory.

    ``groups``: by generation, each that it has come to, and when it has formed. ``carriers``: how each move is carried out.
    ``spoils``: the next gradient that it computes is not finite.
    """

    def __init__(
        self, world: Stage, slot: int, node: Host, number: int, rng: random.Random, layout: Callable[[SimRank], SimLayout]
    ) -> None:
        self.world, self.node, self.rng = world, node, rng
        self.protocol = MemberProtocol(slot, f"token-{number}", Process(node.name, 1000 + number, number), f"{node.name}:{number}")
        self.protocol.sharded = bool(LAYOUTS[world.settings.optimizer_sharding].spread)
        self.rank_machine = RankMachine(self.protocol)
        self.alive, self.hung = True, False
        self.still, self._frozen_s = Stoppable(), 0.0
        self.spoils = False
        self.where = (-1, -1)
        self.movement = Movement(world.clock.now_s)
        self.pace, self.timed = RankPace(), TimedSteps()
        self.groups: dict[int, tuple[SimGroup, Future]] = {}
        self.carriers: dict[type, Callable[[Any], Any]] = {}
        self.layout = layout(self)
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
    def group(self) -> SimGroup:
        """That of its view."""
        return self.groups[self.rank_machine.view.generation][0]

    @property
    def responsive(self) -> bool:
        return not self.still.stopped and not self.hung

    # ---- the process as others see it ----------------------------------------------------------------------------------------------------

    def gate(self, call: Callable[[], None]) -> None:
        """Everything that happens in this process comes through here: not when it is dead, later when it is stopped."""
        if self.alive:
            self.still.gate(call)

    def freeze(self) -> None:
        if self.alive and not self.still.stopped:
            self.still.stopped, self._frozen_s = True, self.world.clock.now_s
            self.world.note("freeze", self)

    def thaw(self) -> None:
        if not self.alive or not self.still.stopped:
            return
        calls = self.still.went_on(self.world.clock.now_s)
        self.world.note("thaw", self)
        for call in calls:
            self.gate(call)

    def die(self, cause: str) -> None:
        """SIGKILL, or the end of the process: its ends of all groups close, its agent sees it."""
        if not self.alive:
            return
        self.alive = False
        self.world.note("dead", self, cause, self.where)
        for generation in list(self.groups):
            self._leave_group(generation)
        self.node.on_death(self, cause)
        self.world.train.on_death(self)
        self.layout.died()

    def pulse(self) -> Pulse:
        now_s, protocol = self.world.clock.now_s, self.protocol
        beat_age_s = now_s - self._frozen_s if self.still.stopped else 0.0
        state = protocol.state or StateId(0, 0)
        moved = self.movement
        return Pulse(self.member, protocol.generation, state, beat_age_s, now_s - moved.at_s, moved.stepping, moved.between)

    def take_times(self) -> RankTimes:
        """What it measured since it was asked last; nothing but whole steps of one view."""
        times, self.timed.rows = self.timed.rows, []
        return RankTimes(self.member, *zip(*times, strict=True))

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
        self.obey()
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

    def obey(self) -> None:
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
                    Coroutine(self.world.clock, self.carriers[KeepBeside](order), self.gate)
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
                self.obey()
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

    def wait(self, move: Wait) -> Steps:
        late_s = math.inf
        if move.again_s is not None:
            late_s = self.world.clock.now_s + move.again_s
            self.world.clock.after(move.again_s, lambda: self.gate(self._wake))
        while True:
            if self.protocol.fenced is not None:
                raise Fenced(self.protocol.fenced)
            if move.until() or self.world.clock.now_s >= late_s:
                return
            if move.what is Awaited.BARRIER:
                yield from self.point("finished")
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
            return self.still.stopped or self.hung
        return False

    def point(self, name: str) -> Steps:
        """Come to a point; wait there after a stop, for ever when the user's code hangs, which neither beats nor interrupts can tell."""
        if self.at(name):
            yield Future() if self.hung else 0.0

    def _main(self) -> Steps:
        try:
            yield from self._live()
            self.die("exited")
        except (RunOver, Fenced):
            self.die("exited")
        except (UserError, FleetError) as error:
            step, shard = self.where
            self.flush(Raised(self.member, step, shard, str(error), "traceback of the user's code", isinstance(error, LoopError)))
            yield 0.01
            self.die("exited after an error")
        except Dead:
            return

    def _live(self) -> Steps:
        while not self.named:
            if self.rank_machine.over or self.protocol.fenced is not None:
                return
            yield self._next_message()
        yield from self.point("building")
        yield self.rng.uniform(*self.world.plan.build_s)
        if self.rank_machine.over or self.protocol.fenced is not None:
            return
        if not (yield from self.carry(self.rank_machine.run())):
            return
        self.world.watch.behind(self)
        yield from self.point("behind")
        lease = Lease(self.rank_machine, self.world.settings.timeouts.resend_s)
        yield from self.carry(lease.do("end/save"))  # the code behind the loop: one of the ranks writes the model
        yield from self.carry(self.rank_machine.close())
