"""A simulated rank process: the live ``MemberProtocol``, driven as the live loop drives it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fleet.alike import Alike
from fleet.events import Event, Raised
from fleet.instructions import Instruction
from fleet.member import INTERRUPT, MemberProtocol, Offer
from fleet.shards import Shares, foreseen, share
from fleet.simulation.clockwork import Coroutine, Future, Steps
from fleet.simulation.groups import Broken, Group, Sitting
from fleet.simulation.model import POISON
from fleet.slowness import RankTimes
from fleet.types import Finding, Member, Process, Pulse, StateId, View

if TYPE_CHECKING:
    from fleet.simulation.nodes import SimNode
    from fleet.simulation.world import World

Contribution = tuple[StateId, int | None, dict[int, int], Offer]
"""What a rank brings into a reduction: the state it steps from, its weights (None: they are on their way to it), shards, offer."""


class Dead(Exception):
    """Unwinds the coroutine of a process that was killed in the middle of its own code."""


class UserError(Exception):
    """The train function raised."""


class SimRank:
    """One process. ``where`` is (step, shard), as its node's agent would see it in the rank's shared memory."""

    def __init__(self, world: World, slot: int, node: SimNode, number: int, rng: random.Random) -> None:
        self.world, self.node, self.rng = world, node, rng
        self.protocol = MemberProtocol(slot, f"token-{number}", Process(node.name, 1000 + number, number), f"{node.name}:{number}")
        self.alive, self.frozen_s = True, -1.0
        self.weights = POISON
        self.corrupt = False
        self.alike = Alike()
        self.where = (-1, -1)
        self.stepping = False
        self.hung = False
        self.progress_s = world.clock.now_s
        self.started_s = world.clock.now_s
        self.group: Group | None = None
        self.beside: Group | None = None
        self.sitting: Sitting | None = None
        self.held: dict[int, int] = {}
        self.due: tuple[int, ...] = ()
        self.brought: tuple[StateId | None, dict[Member, list[int]]] = None, {}
        self.ahead: tuple[int, ...] = ()
        self.arrival: tuple[StateId, Future] | None = None
        self.early: dict[Member, Contribution] | None = None
        self.slowness = self.link_slowness = 1.0
        self.was_slow = False
        self.times: list[tuple[int, ...]] = []
        self.timed_generation = -1
        self._own: list[float] = []
        self._deferred: list[Callable[[], None]] = []
        self._news: list[Future] = []
        self._failed_proposal = -1
        world.clock.after(rng.uniform(0.01, 0.3), lambda: self.gate(self._start))

    def __str__(self) -> str:
        return f"{self.protocol.slot}.{'?' if self.protocol.incarnation is None else self.protocol.incarnation}"

    @property
    def member(self) -> Member:
        return self.protocol.member

    @property
    def named(self) -> bool:
        return self.protocol.incarnation is not None

    @property
    def responsive(self) -> bool:
        return self.frozen_s < 0 and not self.hung

    # ---- the process as others see it ----------------------------------------------------------------------------------------------------

    def gate(self, call: Callable[[], None]) -> None:
        """Everything that happens in this process comes through here: not when it is dead, later when it is stopped."""
        if not self.alive:
            return
        if self.frozen_s >= 0:
            self._deferred.append(call)
        else:
            call()

    def freeze(self) -> None:
        if self.alive and self.frozen_s < 0:
            self.frozen_s = self.world.clock.now_s
            self.world.note("freeze", self)

    def thaw(self) -> None:
        if not self.alive or self.frozen_s < 0:
            return
        self.frozen_s = -1.0
        self.world.note("thaw", self)
        calls, self._deferred = self._deferred, []
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
        beat_age_s = now_s - self.frozen_s if self.frozen_s >= 0 else 0.0
        state = protocol.state or StateId(0, 0)
        return Pulse(self.member, protocol.generation, state, beat_age_s, now_s - self.progress_s, self.stepping)

    def take_times(self) -> RankTimes:
        """What it measured since it was asked last; nothing but whole steps of one view."""
        times, self.times = self.times, []
        return RankTimes(self.member, *zip(*times, strict=True))

    def _leave_groups(self) -> None:
        if self.named and self.beside is not None:
            self.beside.leave(self.member)
        self.beside = None
        self._leave_seat()

    def _leave_seat(self) -> None:
        for group in (self.group, self.sitting.group if self.sitting else None):
            if group is not None and self.named:
                group.leave(self.member)
        self.group = self.sitting = None

    # ---- messages ------------------------------------------------------------------------------------------------------------------------

    def receive(self, message: Instruction) -> None:
        self.gate(lambda: self._take(message))

    def _take(self, message: Instruction) -> None:
        if self.protocol.receive(message) == INTERRUPT:
            self.world.note("interrupted", self, type(message).__name__, "aside" if self.protocol.view is None else "in person")
            for group in (self.group, self.sitting.group if self.sitting else None, self.beside):
                if group is not None:
                    group.leave(self.member)
        self._look_ahead()
        if self.beside is not None and not self.protocol.holds_proposal(self.beside.view.generation):
            self.beside.leave(self.member)
            self.beside = None
        self.flush()
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

    def _wait(self) -> Future:
        future = Future()
        self._news.append(future)
        return future

    # ---- the loop ------------------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.flush(self.protocol.hello())
        self.world.clock.after(self.world.settings.timeouts.resend_s, lambda: self.gate(self._repeat))
        Coroutine(self.world.clock, self._main(), self.gate)
        Coroutine(self.world.clock, self._form_beside(), self.gate)

    def at(self, point: str) -> bool:
        """A named point of the loop, at which faults can be aimed. True when the process was stopped: yield once."""
        if self.world.faults.at(self, point):
            if not self.alive:
                raise Dead
            return self.frozen_s >= 0 or self.hung
        return False

    def _pause(self) -> Future | float:
        """What to wait for after a stop: for ever when the user's code hangs, which neither beats nor interrupts can tell."""
        return Future() if self.hung else 0.0

    def _main(self) -> Steps:
        try:
            yield from self._live()
            self.die("exited")
        except UserError as error:
            step, shard = self.where
            self.flush(Raised(self.member, step, shard, str(error), "traceback of the user's code"))
            yield 0.01
            self.die("exited after an error")
        except Dead:
            return

    @property
    def _over(self) -> bool:
        return self.protocol.released is not None or self.protocol.fenced is not None

    def _live(self) -> Steps:
        while not self.named and not self._over:
            yield self._wait()
        if self.at("building"):
            yield self._pause()
        yield self.rng.uniform(*self.world.plan.build_s)
        if self._over:
            return
        self.protocol.ready()
        self.flush()
        while not self._over:
            sitting = self._called()
            if sitting is None:
                yield self._wait()
                continue
            try:
                if (yield from self._go_ahead(sitting)):
                    continue
                yield from self._seat(sitting)
                yield from self._steps()
            except Broken as broken:
                self._abandon(str(broken), self.alike.open)

    def _called(self) -> Sitting | None:
        """The view to join now, in person."""
        self.protocol.aside = False
        if self.protocol.interrupted and self.protocol.view is not None:
            self._abandon("told to leave")
        if self.sitting is not None:
            return self.sitting
        if (view := self.protocol.next_view()) is not None:
            return self._sit(view, beside=self._settles_aside(view) and self._foresee(view))
        if (view := self.protocol.proposal()) is not None:
            self.protocol.enter(view)
            return self._sit(view, graceful=True)
        return None

    def _settles_aside(self, view: View) -> bool:
        return self.protocol.settles_aside(view, steady=True)

    def _sit(self, view: View, *, graceful: bool = False, beside: bool = False) -> Sitting:
        self.world.watch.sit(self, view)
        self.sitting = sitting = Sitting(view, self.world.group(view), beside, graceful)
        if beside:
            self._foresee(view)
            Coroutine(self.world.clock, self._settle_beside(sitting), self.gate)
        return sitting

    def _foresee(self, view: View) -> bool:
        """What this rank will have to bring in ``view`` if all others bring what they had to in the last one."""
        (at, had), state = self.brought, self.protocol.state
        if state is None or at != state or state.step >= self.world.plan.steps or self.member not in had:
            return False
        if not self.ahead:
            self.ahead = foreseen(had, view, self.member, self.world.settings.shards, self._idle(view))
        self.due = tuple(sorted({*had[self.member], *self.ahead} - self.held.keys()))
        return bool(self.due)

    def _go_ahead(self, sitting: Sitting) -> Steps:
        """Compute what is foreseen while the group forms; true when that was done, and the rank looks again where it stands."""
        if not sitting.beside or sitting.promised or not self._foresee(sitting.view):
            return False
        assert self.protocol.state is not None
        self.world.note("ahead", self, sitting.view.generation, self.due)
        self.stepping, self.progress_s = True, self.world.clock.now_s
        self._step_aside()
        yield from self._compute(self.protocol.state.step)
        return True

    def _step_aside(self) -> None:
        self.protocol.step_aside()
        self._look_ahead()
        self.flush()

    # ---- aside ---------------------------------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """What the listening thread does while the loop computes: leave a seat that is lost, and take the next one."""
        view = self.protocol.view
        held = [self.group.view if self.group else None, self.sitting.view if self.sitting else None]
        if any(one is not None and (view is None or one.generation != view.generation) for one in held):
            self._leave_seat()
        if not self.protocol.aside or self.protocol.view is not None or (view := self.protocol.next_view()) is None:
            return
        self._sit(view, beside=self._settles_aside(view))

    def _settle_beside(self, sitting: Sitting) -> Steps:
        view, state = sitting.view, self.protocol.state
        try:
            yield sitting.group.arrive(self.member, self.world.settings.timeouts.form_s)
            if self.sitting is sitting:
                sitting.promised = True
                sitting.group.tell(self.member, sorted({*self.held, *self.due}))  # the loop goes on with what is due
            if self.protocol.gives(view):
                yield from self._donate(sitting.group, graceful=False)
            if self.sitting is not sitting or self.protocol.view is not view or self.protocol.interrupted:
                raise Broken("told to leave")
            assert state is not None
            self.protocol.formed(state)
            self.world.note("formed aside", self, view.generation, state)
        except Broken as broken:
            sitting.error = str(broken)
            if self.sitting is sitting and self.protocol.aside:
                self._leave_seat()
                self.protocol.broken(str(broken))
        except Dead:
            return
        sitting.done = True
        self.flush()
        self._wake()

    def _claim(self) -> bool:
        """The loop is here in person; False when it has no seat."""
        self.protocol.aside = False
        return self.protocol.view is not None and not self.protocol.interrupted and self.sitting is None and self.group is not None

    @property
    def _wanted(self) -> bool:
        return self.protocol.interrupted or (self.sitting is not None and not self.sitting.beside)

    def _abandon(self, reason: str, testimony: Finding | None = None) -> None:
        self.world.note("broken", self, reason, f"dirty={self.protocol.dirty}")
        self._leave_groups()
        self.arrival = self.early = None
        self.stepping = False
        self.protocol.withdraw()
        self.protocol.broken(reason, testimony)
        self.flush()

    def _seat(self, sitting: Sitting) -> Steps:
        if self.at("forming"):
            yield self._pause()
        if sitting.beside:
            while not sitting.done:
                yield self._wait()
            if sitting.error is not None or self.sitting is not sitting:
                raise Broken(sitting.error or "told to leave")
        else:
            yield sitting.group.arrive(self.member, self.world.settings.timeouts.form_s)
        if self.sitting is not sitting or self.protocol.interrupted:
            raise Broken("told to leave")
        self.group, self.sitting = sitting.group, None
        self.arrival = self.early = None
        if not sitting.beside:
            yield from self._take_state(self.group, sitting.graceful)
        self._begin_stepping(self.group.view)
        yield from self._take_shares(self.group)
        yield from self._reduce_early(self.group)
        self._check_seated(self.group.view)

    def _take_shares(self, group: Group) -> Steps:
        """What each has or has promised of the step at hand counts, the rest is dealt anew. Nobody waits for a receiver: it has nothing."""
        view, givers = group.view, self._givers(group.view)
        if self.member in givers:
            group.tell(self.member, sorted(self.held))
        told: dict[Member, Any] = yield group.told(self.member, givers)
        brought = [told.get(member, ()) for member in view.members]
        shares = share(brought, view.ranges, self.world.settings.shards, self._idle(view), view.giver)
        rank = view.rank_of(self.member)
        kept = {shard for lo, hi in shares.kept[rank] for shard in range(lo, hi)}
        self.held = {shard: value for shard, value in self.held.items() if shard in kept}
        self._bring(shares)

    def _bring(self, shares: Shares) -> None:
        """Who brings what into the step at hand, in the view that this rank sits in."""
        assert self.group is not None
        had = dict(zip(self.group.view.members, shares.brought(self.world.settings.shards), strict=True))
        state = self.protocol.state if self.arrival is None else self.arrival[0]
        self.brought, self.ahead = (state, had), ()
        self.due = tuple(shard for shard in had[self.member] if shard not in self.held)

    def _idle(self, view: View) -> tuple[int, ...]:
        return view.idle

    def _reduce_early(self, group: Group) -> Steps:
        """A newcomer that brings nothing takes part in the sum while its state is on its way."""
        if self.arrival is None:
            return
        state, arrived = self.arrival
        if not self.due and not self.held and state.step < self.world.plan.steps:
            offer = self.protocol.offer()
            values = yield group.reduce(self.member, 0, (state, None, {}, offer))
            self._compare(values)
            self.early = values
        yield arrived
        self.arrival = None

    def _compare(self, values: dict[Member, Contribution]) -> None:
        if self.alike.differ([value[1] for value in values.values() if value[1] is not None]):
            raise Broken("weights differ")

    @staticmethod
    def _givers(view: View) -> list[Member]:
        return [member for rank, member in enumerate(view.members) if rank not in view.receivers]

    def _begin_stepping(self, view: View) -> None:
        state = self.protocol.state if self.arrival is None else self.arrival[0]
        assert state is not None
        self.stepping = True
        self.alike.seat(view.generation, state, view.rank_of(self.member) in view.receivers)

    def _check_seated(self, view: View) -> None:
        assert self.protocol.state is not None
        self.world.watch.seated(self, view, self.protocol.state)

    def _take_state(self, group: Group, graceful: bool) -> Steps:
        """The donor gives, receivers take, the others go on with what they have; ends with the word that this rank is there."""
        view, protocol = group.view, self.protocol
        rank = view.rank_of(self.member)
        state = protocol.state
        if rank == view.donor:
            state = yield from self._donate(group, graceful)
        elif rank in view.receivers:
            offered = yield from self._offered(group)
            self.arrival = offered[0], Future()
            Coroutine(self.world.clock, self._receive_beside(group, offered, self.arrival[1]), self.gate)
            if not self.alive:
                raise Dead
            return
        if group.broken_for(self.member) is not None:
            raise Broken(group.broken_for(self.member))
        assert state is not None
        self._formed(view, state)

    def _formed(self, view: View, state: StateId) -> None:
        self.progress_s = self.world.clock.now_s
        self.protocol.formed(state)
        self.flush()
        self.world.note("formed", self, view.generation, state)

    def _donate(self, group: Group, graceful: bool) -> Steps:
        state = yield from self._begin(group.view, graceful)
        assert state is not None
        if group.view.receivers:
            yield from self._post(group, state)
        return state

    def _begin(self, view: View, graceful: bool) -> Steps:
        """The donor's state: the one that it holds, unless a new history begins."""
        protocol = self.protocol
        state = protocol.state
        if view.checkpoint is not None:
            self.held = {}
            yield self.rng.uniform(0.01, 0.1)
            weights = self.world.load(view.checkpoint)
            if weights is None:
                raise Broken("a memory does not give its part")
            self.world.watch.restored(self, view, weights)
            protocol.receiving()
            self.weights = POISON
            yield self.rng.uniform(0.02, 0.3)
            self.weights = weights
            return view.state
        if state is None or (not graceful and state.lineage != view.state.lineage):
            if self.protocol.dirty or state is not None:
                raise UserError("there is no checkpoint to go back to, and this rank's initial state is gone")
            self.weights, self.held = self.world.chain.weights(0), {}
            return view.state
        return state

    def _post(self, group: Group, state: StateId) -> Steps:
        if self.corrupt and len(group.view.receivers) == len(group.view.members) - 1:
            self.world.excused = True  # the only one that holds this state: nobody can tell
        group.post_state((state, self.weights))
        if self.at("donating"):
            yield self._pause()
        yield self.rng.uniform(0.02, 0.2)

    def _receive_beside(self, group: Group, offered: tuple[StateId, int], arrived: Future) -> Steps:
        view, state = group.view, offered[0]
        try:
            yield from self._take_in(group, *offered)
            if self.protocol.view is not view:
                raise Broken("left meanwhile")
        except Broken as broken:
            arrived.resolve(error=broken)
        except Dead:
            return
        else:
            self._formed(view, state)
            arrived.resolve()

    def _receive_state(self, group: Group) -> Steps:
        offered = yield from self._offered(group)
        yield from self._take_in(group, *offered)
        return offered[0]

    def _offered(self, group: Group) -> Steps:
        self.held = {}
        return (yield group.receive_state(self.member))

    def _take_in(self, group: Group, state: StateId, weights: int) -> Steps:
        if self.protocol.view is not group.view:
            raise Broken("left meanwhile")  # and has said what it holds
        self.protocol.receiving()
        self.weights = POISON
        if self.at("receiving"):
            yield self._pause()
        yield self.rng.uniform(0.02, 0.25)
        if group.broken_for(self.member) is not None:
            raise Broken(group.broken_for(self.member))
        if self.at("received"):
            yield self._pause()
        self.weights = weights
        self.corrupt = self.world.flipped and weights != self.world.chain.weights(state.step)

    # ---- in a view: see fleet.simulation.steps -------------------------------------------------------------------------------------------

    def _steps(self) -> Steps:
        raise NotImplementedError

    def _compute(self, step: int) -> Steps:
        raise NotImplementedError

    def _form_beside(self) -> Steps:
        raise NotImplementedError
