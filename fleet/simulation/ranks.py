"""A simulated rank: its process, with clocks, channels and faults around the live ``RankMachine``, and the layout of its state.

Its steps are in :mod:`fleet.simulation.steps`. Layouts of sharded state are in :mod:`fleet.simulation.sharded` and
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
from fleet.protocol.chunks import Chunk, Claim, StateCut
from fleet.protocol.events import Event, Raised
from fleet.protocol.instructions import Instruction, Quiesce
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
    """Unwinds the coroutine of a process that was killed within its own code."""


class UserError(Exception):
    """The train function raised."""


@dataclass(slots=True)
class RankPace:
    """Factors on the time of a process: for its ``own`` work, on the ``link``, and for its work on a ``machine`` without free cores.

    ``slow``: a trouble has made it slow at some time.
    """

    own: float = 1.0
    link: float = 1.0
    machine: float = 1.0
    slow: bool = False


@dataclass(slots=True)
class TimedSteps:
    """The measured times of a process's whole steps of one view, which it has not yet reported."""

    generation: int = -1
    rows: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Movement:
    """An agent's view of a process: whether it is ``stepping``, or ``between`` two steps, and when it moved last."""

    at_s: float
    stepping: bool = False
    between: bool = False


class SimLayout:
    """The state of a simulated rank, like :class:`actors.rank.step.layout.StateLayout`. This layout is for whole replicas.

    Layouts for sharded state override its methods.

    Attributes:
        weights: stands for the parameters; poison while they are incomplete.
        corrupt: a bit has flipped in the state, and no rank knows that.
        held: by shard, the values that this rank has computed of the present step.
        kept: the chunks of a sharded state, see :class:`fleet.simulation.sharded.SimChunks`; None for whole replicas.
        useless: the reason why a shard that is computed now does not count; empty while it does.
    """

    weights = POISON
    corrupt = False
    kept: Any = None
    useless = ""
    spares_newcomers = True

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.held: dict[int, int] = {}

    @property
    def compared(self) -> int:
        """Stands for the digest that this rank compares with all others before each sum."""
        return self.weights

    @property
    def apart(self) -> str:
        """Why the rank keeps no part of a sharded state while it stands by."""
        world = self.rank.world
        return "it lacks 1 byte" if world.settings.spread and self.rank.member.slot in world.plan.roomless else ""

    def reset(self) -> None:
        """Drop all of the present attempt."""
        self.held = {}

    @property
    def adding(self) -> Collection[Chunk]:
        """The chunks whose gradients this rank adds up for others in the present step."""
        return ()

    @property
    def there(self) -> Collection[int] | None:
        """The shards whose gradients this rank has, of all that it adds up for others; None: it adds up its own alone."""
        return None

    def drop(self) -> None:
        """Drop the sums that this rank has made for others."""

    def count(self, shards: Collection[int]) -> None:
        """These shards of the step count in the view that begins."""

    def repeat(self) -> None:
        """All ranks compute the step once more."""

    def leave(self) -> Steps:
        """The rank leaves its view."""
        yield from ()

    def contribute(self, shard: int, value: int, right: int) -> None:
        """The gradient of a shard leaves this rank, if others add it up. ``right``: the same where it is finite."""

    def summed(self, merged: Mapping[int, int]) -> dict[int, int]:
        """The contributions by shard as this rank has them, from those that the ranks have reported."""
        return dict(merged)

    def begin(self, move: Begin) -> Steps:
        """Begin with the view's whole state, loaded or built."""
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
            rank.world.excused = True  # only this rank holds the state, so no other rank can tell
        group.post_state(rank.member, (state, self.weights))
        try:
            yield from rank.point("donating")
        except Dead:
            return
        yield rank.rng.uniform(0.02, 0.2)
        broken = group.broken_for(rank.member)
        given.resolve(error=Broken(broken) if broken is not None else None)

    def put_in_place(self, group: SimGroup, state: StateId, weights: int) -> Steps:
        """Put the received state in the place of the old one. Raises Broken."""
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
        """The parameters for a shard. None: this rank cannot get them."""
        yield from ()
        return self.weights

    def look_again(self) -> None:
        """This rank has left its view: answers that other ranks wait for may not come."""

    def evaluate(self) -> Steps:
        """Between two steps, get all parameters on this rank alone."""
        yield from ()

    def flush(self) -> Steps:
        """Raises Broken where this rank's computed shards do not count."""
        yield from ()

    def word(self, sums: Mapping[int, int]) -> bool:
        """Whether this rank's sums are all finite. ``sums``: the contributions by shard."""
        return SPOILED not in sums.values()

    def take_out(self) -> int:
        """The state is about to change. Gives the old one."""
        before, self.weights = self.weights, POISON
        return before

    def put_back(self, value: int, at: StateId, *, turns: bool) -> None:
        """The state has changed to ``value``, at the state ``at``. ``turns``: all ranks took the step together, and may turn to another
        cut."""
        self.weights = value

    def followed(self) -> None:
        """This rank has taken a step that other ranks had taken before."""

    def publish(self) -> Steps:
        """Send other ranks the parts of the step that they need. Raises Broken."""
        yield from ()
        self.rank.world.watch.commit(self.rank, self.rank.rank_machine.here)

    # ---- a view begins, where chunks of the state move -----------------------------------------------------------------------------------

    def moving(self) -> AbstractContextManager[None]:
        """A context around a change of this rank's chunks."""
        return nullcontext()

    def gather(self, group: SimGroup, there: Sequence[Claim]) -> Steps:
        """Bring the parameters to all ranks that keep them whole. Raises Broken."""
        yield from ()

    def introduce(self, group: SimGroup) -> Steps:
        """Exchange the data that members need before chunks are placed. Raises Broken."""
        yield from ()

    def claim(self) -> Claim:
        """This rank's claim, where no rank has the whole state."""
        claim: Claim = self.kept.claim()
        return claim

    def resettle(self, view: View) -> Steps:
        """Come to one state with the other members of ``view``. Gives ``ViewState``. Raises Broken."""
        return (yield from self.kept.resettle(view))

    def place(self, column: Column, cut: StateCut, *, inherited: bool) -> None:
        """This rank has its chunks of ``cut`` in a view. ``inherited``: none has moved, so the step may go on."""

    def turn_to(self, cut: StateCut) -> None:
        """Behind a step, this rank has its chunks of another cut."""

    def died(self) -> None:
        """The process is gone."""


class SimRank:
    """One process. ``where``: (step, shard), which an agent would see in the rank's shared memory.

    ``groups``: by generation, each group that the rank has come to, and the future of its forming. ``together``: the same of the ranks with
    which it computes shards; it leaves such a group when its loop comes out of the view. ``carriers``: by class of move, the function that
    carries it out. ``spoils``: the rank's next gradient is not finite.
    """

    def __init__(
        self, world: Stage, slot: int, node: Host, number: int, rng: random.Random, layout: Callable[[SimRank], SimLayout]
    ) -> None:
        self.world, self.node, self.rng = world, node, rng
        self.protocol = MemberProtocol(slot, f"token-{number}", Process(node.name, 1000 + number, number), f"{node.name}:{number}")
        self.protocol.sharded = not world.settings.replicated
        self.rank_machine = RankMachine(self.protocol)
        self.alive, self.hung = True, False
        self.still, self._frozen_s = Stoppable(), 0.0
        self.spoils = False
        self.where = (-1, -1)
        self.movement = Movement(world.clock.now_s)
        self.pace, self.timed = RankPace(), TimedSteps()
        self.groups: dict[int, tuple[SimGroup, Future]] = {}
        self.together: dict[int, tuple[SimGroup, Future]] = {}
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
        """The process's end of all links."""
        return f"{self.node.name}/{self.protocol.token}"

    @property
    def named(self) -> bool:
        return self.protocol.incarnation is not None

    @property
    def group(self) -> SimGroup:
        """The group of the rank's view."""
        return self.groups[self.rank_machine.view.generation][0]

    @property
    def responsive(self) -> bool:
        return not self.still.stopped and not self.hung

    # ---- the process, from outside -------------------------------------------------------------------------------------------------------

    def gate(self, call: Callable[[], None]) -> None:
        """All calls of this process pass through here. A dead process drops them, and a stopped process delays them."""
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
        """SIGKILL, or the end of the process: its ends of all groups close, and its agent sees that."""
        if not self.alive:
            return
        self.alive = False
        self.world.note("dead", self, cause, self.where)
        for generation in list(self.groups):
            self._leave_group(generation)
        self.part()
        self.node.on_death(self, cause)
        self.world.train.on_death(self)
        self.layout.died()

    def pulse(self) -> Pulse:
        now_s, protocol = self.world.clock.now_s, self.protocol
        beat_age_s = now_s - self._frozen_s if self.still.stopped else 0.0
        state = protocol.state or StateId(0, 0)
        moved, kept = self.movement, self.layout.kept
        moving = kept is not None and kept.recut is not None
        return Pulse(self.member, protocol.generation, state, beat_age_s, now_s - moved.at_s, moved.stepping, moved.between, moving)

    def take_times(self) -> RankTimes:
        """The measured times since the last call, of whole steps of one view."""
        times, self.timed.rows = self.timed.rows, []
        return RankTimes(self.member, *zip(*times, strict=True))

    def _wake_in(self, generation: int) -> None:
        """Wake the loop, if it waits for the others of its group in ``generation``."""
        if self.alive and generation in self.together:
            self.together[generation][0].leave(self.member)

    def part(self, but: int = -1) -> None:
        """The loop computes no shard: leave the ranks with which it did, except those of generation ``but``."""
        for generation in [one for one in self.together if one != but]:
            group, _ = self.together.pop(generation)
            group.leave(self.member)

    def _leave_group(self, generation: int, graceful: bool = False) -> None:
        group, _ = self.groups.pop(generation)
        group.leave(self.member, graceful)

    # ---- messages ------------------------------------------------------------------------------------------------------------------------

    def receive(self, message: Instruction) -> None:
        self.gate(lambda: self._take(message))

    def alone(self) -> None:
        """The agent is gone: like a live rank, the rank leaves its view by itself."""
        if self.alive and self.named:
            self.receive(Quiesce((self.member,), self.protocol.generation))

    def _take(self, message: Instruction) -> None:
        self.rank_machine.receive(message)
        self.obey()
        self._wake()

    def _wake(self) -> None:
        """Wake coroutines that wait for a message, to check again."""
        news, self._news = self._news, []
        for future in news:
            future.resolve()

    def flush(self, *events: Event) -> None:
        """Send the messages of the protocol's outbox."""
        outbox, self.protocol.outbox = [*self.protocol.outbox, *events], []
        for event in outbox:
            self.node.from_rank(self, event)

    def reconnect(self) -> None:
        """The agent hung up: send hello again, and the last status."""
        self.gate(lambda: self.flush(self.protocol.hello(), *(self.protocol.status() if self.named else [])))

    def _repeat(self) -> None:
        if self.protocol.waits:
            self.flush(*self.protocol.status())
        self.world.clock.after(self.world.settings.timeouts.resend_s, lambda: self.gate(self._repeat))

    # ---- the rank machine ----------------------------------------------------------------------------------------------------------------

    def obey(self) -> None:
        """Carry out the rank machine's orders, and send its messages. A process that was killed meanwhile carries out none."""
        while self.alive and self.rank_machine.orders:
            match self.rank_machine.orders.pop(0):
                case Form(formed):
                    form_s = self.world.settings.timeouts.form_s
                    group = self.world.group(formed)
                    self.groups[formed.generation] = group, group.arrive(self.member, form_s, self.end)
                    if self.world.settings.of_unit > 1:
                        group = self.world.computing(formed, self.member)
                        self.together[formed.generation] = group, group.arrive(self.member, form_s, self.end)
                case Settle(joining):
                    Coroutine(self.world.clock, self._beside(self.rank_machine.settle(joining)), self.gate)
                case Drop(generation, parting):
                    self._leave_group(generation, graceful=parting is Parting.AGREED and not self.world.plan.abrupt)
                    if generation in self.together:
                        quiesce_s = self.world.settings.timeouts.quiesce_s
                        self.world.clock.after(quiesce_s, lambda generation=generation: self._wake_in(generation))  # type: ignore[misc]
                case Wake(generation):
                    self.groups[generation][0].leave(self.member)
                    self._wake_in(generation)
                case KeepBeside(order):
                    Coroutine(self.world.clock, self.carriers[KeepBeside](order), self.gate)
        view = self.protocol.view
        if view is not self._joined_view and view is not None:
            self.world.watch.joining(self, view)
        self._joined_view = view
        self.flush()

    def _beside(self, moves: Moves) -> Steps:
        """Carry out moves in a separate thread."""
        try:
            yield from self.carry(moves)
        except Dead:
            return
        self._wake()

    def carry(self, moves: Moves) -> Steps:
        """Carry out one move after the other; gives the result of ``moves``."""
        value, lost = None, None
        while True:
            try:
                move = moves.send(value) if lost is None else moves.throw(lost)
            except StopIteration as end:
                return end.value
            finally:
                self.obey()
            value = lost = None
            if not self.alive:  # a thread beside the loop was killed at its own point
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
        if move.what is Awaited.CALL:
            joining = self.rank_machine.joining
            self.part(but=joining.view.generation if joining is not None else -1)
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
        """Come to a named point of the loop, at which troubles can be fired. True when the process was stopped: yield once."""
        if self.world.faults.at(self, point):
            if not self.alive:
                raise Dead
            return self.still.stopped or self.hung
        return False

    def point(self, name: str) -> Steps:
        """Come to a point, and wait there after a stop. If the user's code hangs, the wait never ends, while the process still beats."""
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
        while not self.named or (self.world.settings.mesh and not self.protocol.coordinate):  # it builds its model for its coordinate
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
