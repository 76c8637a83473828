"""How a simulated rank carries out what the rank machine asks for: groups, state and steps of the simulated world."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fleet.errors import GroupLost
from fleet.protocol import moves
from fleet.protocol.duties import Duties
from fleet.protocol.events import PartFailed, PartWritten
from fleet.protocol.instructions import Keep
from fleet.protocol.levels import PEERS, STORE, level_at, level_of
from fleet.protocol.member import Offer
from fleet.protocol.moves import Arriving, Move
from fleet.protocol.replica_check import ReplicaCheck
from fleet.protocol.types import Finding, Member, Part, StateId, View
from fleet.protocol.vote import CommitVote, Doubt, Words
from fleet.simulation.clockwork import Coroutine, Future, Steps
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import POISON, SPOILED, gradient, updated
from fleet.simulation.ranks import Dead, Movement, SimRank, TimedSteps
from fleet.simulation.stores import StoreFails

Contribution = tuple[StateId, int | None, dict[int, int], Offer]
"""What a rank brings into a reduction: the state it steps from, its weights (None: they are on their way to it), shards, offer."""


@dataclass(frozen=True, slots=True)
class Sum:
    """What reduction ``number`` of a view told every member; ``values`` by member."""

    number: int
    values: dict[Member, Contribution]
    doubt: Doubt | None = None
    norm_limit: float = math.inf
    disputed: bool = False

    @property
    def offers(self) -> list[Offer]:
        return [value[3] for value in self.values.values()]

    @property
    def merged(self) -> dict[int, int]:
        """What all shards have contributed."""
        return {shard: value for each in self.values.values() for shard, value in each[2].items()}


class SteppingRank(SimRank):
    """A whole rank: its process is :class:`SimRank`'s."""

    steady = spares_newcomers = True
    spread = False
    checks: Collection[int] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.duties = Duties(self.world.settings.shards)
        self.vote = CommitVote(spread=self.spread)
        self.rank_machine.serve(self, self.duties, self.vote, self.world.plan.steps)
        self.held: dict[int, int] = {}
        self.replica_check = ReplicaCheck()
        self.transfer: Future | None = None
        self._number = 0
        self._own: list[float] = []
        self._rested = StateId(0, 0)
        self._first = True
        self._carriers: dict[type[Move], Callable[[Any], Any]] = {
            moves.Rehearse: self._rehearse,
            moves.Wait: self._wait,
            moves.Clear: self._clear,
            moves.Hold: self._nothing,
            moves.Reset: self._reset,
            moves.Meet: self._meet,
            moves.Load: self._load,
            moves.Begin: self._begin,
            moves.Receive: self._receive,
            moves.Give: self._give,
            moves.HoldStill: self._hold_still,
            moves.Promise: self._promise,
            moves.AssignShards: self._share,
            moves.ViewJoined: self._joined,
            moves.Compute: self._compute,
            moves.Attempted: self._between,
            moves.Reduce: self._reduce,
            moves.CastVote: self._cast_vote,
            moves.Repeat: self._compute_anew,
            moves.Apply: self._apply,
            moves.StepCommitted: self._committed,
            moves.Expect: self._nothing,
            moves.Save: self._save,
            moves.Digest: self._digest,
            moves.CarryOut: self._carry_out,
        }

    @property
    def carriers(self) -> dict[type[Move], Callable[[Any], Any]]:
        return self._carriers

    @property
    def testimony(self) -> Finding | None:
        return self.replica_check.open

    def formed(self, generation: int) -> bool:
        return self.groups[generation][1].done

    @property
    def group(self) -> SimGroup:
        return self.groups[self.rank_machine.view.generation][0]

    def _nothing(self, move: Move) -> None:
        """What takes a live rank no time that counts."""

    def _rehearse(self, move: moves.Rehearse) -> Steps:
        """The first step of a process: imports, compilation, memory. It beats meanwhile."""
        if self.world.plan.rehearse_s[1]:
            yield self.rng.uniform(*self.world.plan.rehearse_s)

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def _clear(self, move: moves.Clear) -> Steps:
        self.world.note("broken", self, f"dirty={self.protocol.dirty}")
        self.movement.stepping = False
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            try:
                yield transfer
            except GroupLost as lost:
                self.world.note("no state", self, lost)

    def _reset(self, move: moves.Reset) -> None:
        self.held = {}

    def _meet(self, move: moves.Meet) -> Steps:
        group = self.groups.get(move.view.generation)
        if group is None:
            raise Broken("told to leave")
        if self.at("forming"):
            yield self._pause()
        yield group[1]
        self._number = 0

    def _load(self, move: moves.Load) -> Steps:
        yield self.rng.uniform(0.01, 0.1)
        assert move.view.checkpoint is not None
        if level_at(move.view.checkpoint) == STORE and (read := self.world.store.read(self.end)) is not None:
            try:
                yield read
            except StoreFails as error:
                raise Broken(f"the store does not give its checkpoint: {error}") from error
        weights = self.world.load(self.end, move.view.checkpoint)
        if weights is None:
            raise Broken("a memory does not give its part")
        self.world.watch.restored(self, move.view, weights)
        return weights

    def _begin(self, move: moves.Begin) -> Steps:
        self.held = {}
        if move.loaded is None:
            self.weights = self.world.chain.weights(0)
            return
        self.weights = POISON
        yield self.rng.uniform(0.02, 0.3)
        self.weights = move.loaded

    def _give(self, move: moves.Give) -> None:
        self.transfer = Future()
        Coroutine(self.world.clock, self._post(self.group, move.state, self.transfer), self.gate)

    def _post(self, group: SimGroup, state: StateId, given: Future) -> Steps:
        if self.corrupt and len(group.view.receivers) == len(group.view.members) - 1:
            self.world.excused = True  # the only one that holds this state: nobody can tell
        group.post_state((state, self.weights))
        try:
            if self.at("donating"):
                yield self._pause()
        except Dead:
            return
        yield self.rng.uniform(0.02, 0.2)
        broken = group.broken_for(self.member)
        given.resolve(error=Broken(broken) if broken is not None else None)

    def _receive(self, move: moves.Receive) -> Steps:
        self.held, group = {}, self.group
        state, weights = yield group.receive_state(self.member)
        self.transfer = Future()
        Coroutine(self.world.clock, self._take_in(group, state, weights, self.transfer), self.gate)
        return Arriving(state, True)

    def _take_in(self, group: SimGroup, state: StateId, weights: int, arrived: Future) -> Steps:
        try:
            self.rank_machine.receiving(group.view)
            yield from self._put_in_place(group, state, weights)
            self.rank_machine.received(group.view, state)
        except GroupLost as lost:
            arrived.resolve(error=lost)
        except Dead:
            return
        else:
            self._obey()
            arrived.resolve()

    def _put_in_place(self, group: SimGroup, state: StateId, weights: int) -> Steps:
        self.weights = POISON
        if self.at("receiving"):
            yield self._pause()
        yield self.rng.uniform(0.02, 0.25)
        if (broken := group.broken_for(self.member)) is not None:
            raise Broken(broken)
        if self.at("received"):
            yield self._pause()
        self.weights = weights
        self.corrupt = self.world.flipped and weights != self.world.chain.weights(state.step)

    def _hold_still(self, move: moves.HoldStill) -> Steps:
        if self.transfer is not None:
            yield self.transfer
            self.transfer = None

    def _promise(self, move: moves.Promise) -> None:
        self.groups[move.view.generation][0].send(self.member, self._contribution_of(move.shards))

    def _contribution_of(self, shards: Collection[int]) -> list[int]:
        """Of shards that this rank has, or goes on with, those that count in a view that begins within their step."""
        return sorted(shards)

    def _share(self, move: moves.AssignShards) -> Steps:
        """What each has or has promised of the step at hand counts, the rest is dealt anew. Nobody waits for a receiver: it has nothing."""
        view, group = move.view, self.group
        arriving, receives = self.rank_machine.arriving, view.rank_of(self.member) in view.receivers
        here = arriving.state if arriving is not None else self.rank_machine.here
        if here != self.duties.at or receives:
            self.held = {}
        self.movement, self.duties.at = Movement(self.world.clock.now_s, stepping=True), here
        self.replica_check.join(view.generation, here, receives)
        if not receives:
            group.send(
                self.member, self._contribution_of(self.held)
            )  # between steps the newcomers ask, and members know that nothing has begun
        givers = [member for rank, member in enumerate(view.members) if rank not in view.receivers and move.begun]
        received: dict[Member, Any] = (yield group.received(self.member, givers)) if givers else {}
        contributed = [received.get(member, ()) for member in view.members]
        idle = view.idle if self.spares_newcomers else ()
        rank = view.rank_of(self.member)
        shares = self.duties.join(view, rank, contributed, idle)
        kept = {shard for lo, hi in shares.kept[rank] for shard in range(lo, hi)}
        self.held = {shard: value for shard, value in self.held.items() if shard in kept}

    def _joined(self, move: moves.ViewJoined) -> None:
        state = self.rank_machine.here
        self.world.watch.joined(self, move.view, state)
        self.world.note("joined", self, move.view.generation, state)

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def _compute(self, move: moves.Compute) -> Steps:
        """The shards that are due of this rank; it stops early when it is wanted."""
        self._own = []
        if self.rank_machine.goes_ahead:
            self.world.note("ahead", self, self.rank_machine.assigned)
        self.movement.stepping = True
        assigned = self.rank_machine.assigned
        middle, number = len(assigned) // 2, 0
        while pending := self.rank_machine.assigned:  # more may be speculative meanwhile
            if self.rank_machine.wanted or (self.rank_machine.joining is not None and self.rng.random() < 0.2):
                break  # a live loop may act on an interrupt that its listening thread has answered since
            shard = pending[0]
            self.where = (move.step, shard)
            if self.at("compute"):
                yield self._pause()
            weights = yield from self._parameters()
            if weights is None:
                break
            self.held[shard] = SPOILED if self.spoils else gradient(weights, move.step, shard)
            self.spoils = False
            if number == middle:
                began_s = self.world.clock.now_s
                yield self.rng.uniform(*self.world.plan.jitter) * self.world.plan.shard_s * len(assigned) * self.pace.own
                self._own = [float(len(assigned)), self.world.clock.now_s - began_s]
            number += 1
        self.where = (move.step, -1)

    def _parameters(self) -> Steps:
        """From which a shard is computed. None: they cannot be had."""
        yield from ()
        return self.weights

    def _reduce(self, move: moves.Reduce) -> Steps:
        view, group = self.rank_machine.view, self.group
        number, self._number = self._number, self._number + 1
        if move.early:
            arriving = self.rank_machine.arriving
            assert arriving is not None
            values = yield group.reduce(self.member, number, (arriving.state, None, {}, move.offer))
        else:
            values = yield from self._summed(view, group, number, move.offer)
        self.world.watch.reduced(self, view, number, values)
        if self.replica_check.differ([value[1] for value in values.values() if value[1] is not None]):
            raise Broken("weights differ")
        if not move.early and self.at("reduced"):
            yield self._pause()
        return Sum(number, values)

    def _summed(self, view: View, group: SimGroup, number: int, offer: Offer) -> Steps:
        state = self.rank_machine.here
        if self.at("reducing"):
            yield self._pause()
        self.world.watch.contribute(self, view, state, self.protocol.dirty)
        self.replica_check.enter(state, str(self.weights))
        values = yield group.reduce(self.member, number, (state, self.weights, dict(self.held), offer))
        took_s = self.world.clock.now_s - group.complete_s
        if self.pace.link > 1:
            yield took_s * (self.pace.link - 1)
        self._own.append(took_s * self.pace.link)
        return values

    def _cast_vote(self, move: moves.CastVote) -> Words | Steps:
        assert isinstance(move.reduced, Sum)
        return Words((SPOILED not in move.reduced.merged.values(),))

    def _compute_anew(self, move: moves.Repeat) -> None:
        self.world.note("again", self, move.doubt.why)
        self.held = {}
        self.duties.begin_step()

    def _apply(self, move: moves.Apply) -> Steps:
        assert isinstance(move.reduced, Sum)
        view = self.rank_machine.view
        self.world.watch.agreed(self, view, move.reduced.number, move.enter, move.save)
        before, self.weights, self.held = self.weights, POISON, {}
        if self.at("mutating"):
            yield self._pause()
        apply_s = self.rng.uniform(0.001, 0.02)
        yield apply_s
        self.weights = updated(before, move.reduced.merged, self.world.settings.shards)
        self._take_up()
        self._note_times(self.rank_machine.here.step, apply_s)

    def _take_up(self) -> None:
        """The next step, of which nothing is computed."""
        here = self.rank_machine.here
        self.duties.at = StateId(here.history, here.step + 1)
        self.duties.begin_step()
        self.movement.at_s = self.world.clock.now_s

    def _committed(self, move: moves.StepCommitted) -> Steps:
        self.world.watch.commit(self, self.rank_machine.here)
        if self.at("committed"):
            yield self._pause()

    def _between(self, move: moves.Attempted) -> Steps:
        """What a loop body does of its own behind a commit."""
        every, lasts_s = self.world.plan.between_s
        here = self.protocol.state
        if every and here is not None and here.step % every == 0 and here != self._rested:
            self._rested = here
            self.movement.between, self.movement.at_s = True, self.world.clock.now_s
            half_s = self.rng.uniform(0.4, 0.6) * lasts_s
            yield half_s
            if self.at("between"):
                yield self._pause()
            yield half_s
            self.movement.between = False

    def _note_times(self, step: int, apply_s: float) -> None:
        """As the agent of a live rank has it: of whole steps alone."""
        whole, first = len(self._own) == 3 and self._own[0] == len(self.duties.mine), self._first
        self._first = first and not self._own
        if first or not whole:
            return
        view = self.protocol.view
        if view is not None and view.generation != self.timed.generation:
            self.timed = TimedSteps(view.generation)
        shards, compute_s, network_s = self._own
        self.timed.rows.append((step, int(shards), round(compute_s * 1e6), 0, round(network_s * 1e6), round(apply_s * 1e6)))

    # ---- beside the steps, and after them ------------------------------------------------------------------------------------------------

    def _save(self, move: moves.Save) -> Steps:
        view = self.rank_machine.view
        self.world.watch.save(self, view, move.request, self.rank_machine.here)
        if self.at("saving"):
            yield self._pause()
        yield from self._write(view, move.request)

    def keep_beside(self, order: Keep) -> Steps:
        """Its loop may hang: who writes does not."""
        view = View(order.generation, order.members, (), 0, (), order.state, "")
        self.world.watch.save(self, view, order.request, self.rank_machine.here)
        try:
            if self.at("saving") and self.still.lasts:
                yield 0.0
        except Dead:
            return
        yield from self._write(view, order.request)

    def _write(self, view: View, request: int) -> Steps:
        state, weights, blocked_s = self.rank_machine.here, self.weights, self.rng.uniform(0.001, 0.02)
        yield blocked_s
        rank = view.rank_of(self.member)
        name = f"step-{state.step}-history-{state.history}-request-{request}-g{view.generation}"
        part = Part(f"{name}/{rank}", 1, str(weights), (rank,))
        event = PartWritten(self.member, request, name, state, part, blocked_s, "meta" if rank == 0 else "")
        self.world.clock.after(self.rng.uniform(0.01, 0.4), lambda: self.gate(lambda: self._written(view, rank, weights, event)))

    def _written(self, view: View, rank: int, weights: int, event: PartWritten) -> None:
        if level_of(event.request) == PEERS:
            self._answered(event, self.world.copy(self.end, view, rank, weights, event))
        else:
            self.world.store.put(self.end, event.checkpoint, rank, weights, lambda done: self.gate(lambda: self._answered(event, done)))

    def _answered(self, event: PartWritten, done: bool) -> None:
        if done:
            self.protocol.written(event)
            self.flush()
        elif self.rng.random() < 0.5:  # or the word is lost, and the request runs out of time
            self.flush(PartFailed(event.member, event.request, "nobody takes it"))

    def _digest(self, move: moves.Digest) -> str:
        self.movement.stepping = False
        self.world.note("finished", self)
        return str(self.weights)

    def _carry_out(self, move: moves.CarryOut) -> Steps:
        yield self.rng.uniform(0.01, 0.3)
        self.world.watch.did(self, move.key)
        return str(self.weights)
