"""A simulated rank carries out the moves of its rank machine: groups, state and steps of the simulated world.

As in :mod:`actors.rank.step.train_step`, the rank's layout does all work that depends on the place of the state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import GroupLost
from fleet.protocol import moves
from fleet.protocol.chunk_check import ChunkCheck, Row
from fleet.protocol.duties import Duties
from fleet.protocol.events import PartFailed, PartWritten
from fleet.protocol.instructions import Keep
from fleet.protocol.lease import Lease
from fleet.protocol.levels import PEERS, STORE, level_at, level_of
from fleet.protocol.member import Offer
from fleet.protocol.moves import Arriving
from fleet.protocol.once import key_of
from fleet.protocol.replica_check import ReplicaCheck
from fleet.protocol.types import Column, Finding, Member, Part, StateId, View, columns, groups
from fleet.protocol.vote import CommitVote, Doubt, Words
from fleet.simulation.clockwork import Coroutine, Future, Steps
from fleet.simulation.groups import Broken, SimGroup
from fleet.simulation.model import SPOILED, gradient, updated
from fleet.simulation.ranks import Dead, Movement, SimRank, TimedSteps
from fleet.simulation.staged import SimPipeline
from fleet.simulation.stores import StoreFails

EVALUATION = "evaluate"

Contribution = tuple[StateId, int | None, dict[int, int], Offer]
"""A rank's part of a reduction: its state, its weights (None: they are on their way to it), its shards, its offer."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The result of reduction ``number`` of a view; ``values`` by member."""

    number: int
    values: dict[Member, Contribution]
    column: tuple[Member, ...]
    doubt: Doubt | None = None
    norm_limit: float = math.inf
    disputed: bool = False

    @property
    def offers(self) -> list[Offer]:
        return [value[3] for value in self.values.values()]

    @property
    def merged(self) -> dict[int, int]:
        """The contributions by shard, of one column: ``column`` has its members."""
        return {shard: value for member in self.column for shard, value in self.values[member][2].items()}


@dataclass
class _Met:
    """The ranks of a view with which a rank computes, for so many ``shards``. ``lost``: why the present shards do not count, if so.

    ``pipeline``: its units, where the model is cut into stages.
    """

    pipeline: SimPipeline | None = None
    shards: int = 0
    generation: int = -1
    lost: str = ""


class SimStep:
    """Carries out the moves of ``rank``. Each rank has one.

    Attributes:
        sums: by shard, all contributions to the step of the present vote. With them the rank can take the step alone.
        transfer: a state that is on its way from or to this rank.
    """

    steady = True
    checks: Collection[int] = ()

    def __init__(self, rank: SimRank) -> None:
        self.rank, self.world, self.layout, self.machine = rank, rank.world, rank.layout, rank.rank_machine
        self.duties, self.vote = Duties(self.world.settings.shards), CommitVote(spread=rank.protocol.sharded)
        self.machine.serve(self, self.duties, self.vote, self.world.plan.steps)
        self.replica_check, self.chunk_check = ReplicaCheck(), ChunkCheck()
        self.sums: dict[int, int] = {}
        self.transfer: Future | None = None
        self._number = 0
        self._own: list[float] = []
        self._waited_s = 0.0
        self._met = _Met(SimPipeline(rank) if self.world.settings.staged else None)
        self._rested = self._changed = self._evaluated = StateId(0, 0)
        self._first = True
        rank.carriers = {
            moves.KeepBeside: self._keep_beside,
            moves.Wait: rank.wait,
            moves.Rehearse: self._rehearse,
            moves.Clear: self._clear,
            moves.Hold: lambda move: self.layout.leave(),
            moves.Reset: lambda move: self.layout.reset(),
            moves.Meet: self._meet,
            moves.Load: self._load,
            moves.Begin: self._begin,
            moves.Resettle: lambda move: self.layout.resettle(move.view),
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
            moves.Advance: self._follow,
            moves.StepCommitted: self._committed,
            moves.Expect: lambda move: self.layout.kept.go_on() if self.layout.kept is not None else None,
            moves.Save: self._save,
            moves.Digest: self._digest,
            moves.CarryOut: self._carry_out,
        }

    # ---- facts, for the rank machine -----------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Collection[int]:
        return self.layout.held

    @property
    def spares_newcomers(self) -> bool:
        return self.layout.spares_newcomers

    @property
    def testimony(self) -> Finding | None:
        return self.chunk_check.open or self.replica_check.open

    @property
    def apart(self) -> str:
        return self.layout.apart

    def formed(self, generation: int) -> bool:
        return self.rank.groups[generation][1].done

    # ---- a view begins -------------------------------------------------------------------------------------------------------------------

    def _rehearse(self, move: moves.Rehearse) -> Steps:
        """Rehearse the first step of a process: imports, compilation, memory. The process beats meanwhile."""
        if self.world.plan.rehearse_s[1]:
            yield self.rank.rng.uniform(*self.world.plan.rehearse_s)

    def _clear(self, move: moves.Clear) -> Steps:
        self.world.note("broken", self.rank, f"dirty={self.rank.protocol.dirty}")
        self.rank.movement.stepping = False
        self.layout.look_again()
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            try:
                yield transfer
            except GroupLost as lost:
                self.world.note("no state", self.rank, lost)

    def _meet(self, move: moves.Meet) -> Steps:
        group = self.rank.groups.get(move.view.generation)
        if group is None:
            raise Broken("told to leave")
        yield from self.rank.point("forming")
        yield group[1]
        self._number = 0

    def _load(self, move: moves.Load) -> Steps:
        end = self.rank.end
        yield self.rank.rng.uniform(0.01, 0.1)
        assert move.view.checkpoint is not None
        if level_at(move.view.checkpoint) == STORE and (read := self.world.store.read(end)) is not None:
            try:
                yield read
            except StoreFails as error:
                raise Broken(f"the store does not give its checkpoint: {error}") from error
        weights = self.world.load(end, move.view.checkpoint)
        if weights is None:
            raise Broken("a memory does not give its part")
        self.world.watch.restored(self.rank, move.view, weights)
        return weights

    def _begin(self, move: moves.Begin) -> Steps:
        self.layout.reset()
        yield from self.layout.begin(move)

    def _give(self, move: moves.Give) -> None:
        self.transfer = Future()
        Coroutine(self.world.clock, self.layout.post(self.rank.group, move.state, self.transfer), self.rank.gate)

    def _receive(self, move: moves.Receive) -> Steps:
        self.layout.reset()
        group = self.rank.group
        state, weights = yield group.receive_state(self.rank.member)
        self.transfer = Future()
        Coroutine(self.world.clock, self._take_in(group, state, weights, self.transfer), self.rank.gate)
        return Arriving(state, True)

    def _take_in(self, group: SimGroup, state: StateId, weights: int, arrived: Future) -> Steps:
        try:
            self.machine.receiving(group.view)
            yield from self.layout.put_in_place(group, state, weights)
            self.machine.received(group.view, state)
        except GroupLost as lost:
            arrived.resolve(error=lost)
        except Dead:
            return
        else:
            self.rank.obey()
            arrived.resolve()

    def _hold_still(self, move: moves.HoldStill) -> Steps:
        if self.transfer is not None:
            yield self.transfer
            self.transfer = None

    def _promise(self, move: moves.Promise) -> None:
        self.rank.groups[move.view.generation][0].send(self.rank.member, (sorted(move.shards), None))

    def _share(self, move: moves.AssignShards) -> Steps:
        """Assign the shards of the present step: held and promised shards count. No rank waits for a receiver, which has none.

        Of ranks that compute together, a shard counts that all of them hold.
        """
        column, group, layout = move.view.column_of(self.rank.member), self.rank.group, self.layout
        place = column.rank_of(self.rank.member)
        arriving, receives = self.machine.arriving, place in column.receivers
        here = arriving.state if arriving is not None else self.machine.here
        if here != self.duties.at or receives:
            layout.reset()
        there = None if receives else self._there()
        self.rank.movement, self.duties.at = Movement(self.world.clock.now_s, stepping=True), here
        self.replica_check.join(column.generation, here, receives)
        self.chunk_check.join(column.generation, here)
        if self.layout.kept is not None:
            self.layout.kept.settled_at = None
        if not receives:  # between steps only newcomers need this: members know that no shard is computed
            group.send(self.rank.member, (sorted(layout.held), there))
        view = move.view
        givers = [member for rank, member in enumerate(view.members) if rank not in view.receivers and move.begun]
        received: dict[Member, Any] = (yield group.received(self.rank.member, givers)) if givers else {}
        known = [one for _, one in (*received.values(), ((), there)) if one is not None]
        everywhere = frozenset(range(self.duties.shards)).intersection(*known)
        mine = frozenset(columns(view.members)[self.rank.member.coordinate])
        contributed = [
            everywhere.intersection(*(received.get(view.members[each], ((), None))[0] for each in together))
            for together in groups(view.members)
            if not mine.isdisjoint(together)
        ]
        self._met.shards, self._met.generation, self._met.lost = 0, view.generation, ""
        if self._met.pipeline is not None:
            held = [received.get(member, ((), None))[0] for member in view.members]
            held[view.rank_of(self.rank.member)] = () if receives else sorted(layout.held)
            self._met.pipeline.join(view, held, here)
        self.rank.part(but=view.generation)
        shares = self.duties.join(column, place, contributed, column.idle if layout.spares_newcomers else ())
        layout.count(frozenset[int]().union(*contributed))
        kept = {shard for lo, hi in shares.kept[place] for shard in range(lo, hi)}
        layout.held = {shard: value for shard, value in layout.held.items() if shard in kept}

    def _there(self) -> Collection[int] | None:
        if self.testimony is not None:
            self.layout.drop()
        return self.layout.there

    def _joined(self, move: moves.ViewJoined) -> None:
        state = self.machine.here
        self.world.watch.joined(self.rank, move.view, state)
        self.world.note("joined", self.rank, move.view.generation, state)

    # ---- compute -------------------------------------------------------------------------------------------------------------------------

    def _compute(self, move: moves.Compute) -> Steps:
        """Compute this rank's assigned shards. It stops early when the loop is wanted."""
        if self.world.plan.ends(move.step, self.rank.protocol.slot, on_top=True):
            yield from self.machine.end("on top of the next step")
        if self.layout.useless or self.rank.protocol.ends_here:
            return
        rank, machine, plan, self._own, self._met.lost = self.rank, self.machine, self.world.plan, [], ""
        if machine.goes_ahead:
            self.world.note("ahead", rank, machine.assigned)
        rank.movement.stepping = True
        if self._met.pipeline is not None:
            self._met.lost = yield from self._met.pipeline.compute(move.step)
            return
        assigned = machine.assigned
        middle, number = len(assigned) // 2, 0
        while pending := machine.assigned:  # speculative shards may come meanwhile
            if machine.wanted or (machine.joining is not None and rank.rng.random() < 0.2):
                break  # a live loop may act on an interrupt that its listening thread has answered since
            shard = pending[0]
            rank.where = (move.step, shard)
            yield from rank.point("compute")
            weights = yield from self.layout.parameters()
            if weights is None or not (yield from self._together(move.step, shard)):
                break
            right = gradient(weights, move.step, shard)
            self.layout.held[shard] = SPOILED if rank.spoils else right
            rank.spoils = False
            self.layout.contribute(shard, self.layout.held[shard], right)
            if number == middle:
                began_s = self.world.clock.now_s
                took_s = rank.rng.uniform(*plan.jitter) * plan.shard_s * len(assigned) * rank.pace.own
                self._waited_s = took_s * (rank.pace.machine - 1)
                yield took_s + self._waited_s
                self._own = [float(len(assigned)), self.world.clock.now_s - began_s]
            number += 1
        rank.where = (move.step, -1)

    def _together(self, step: int, shard: int) -> Steps:
        """Compute ``shard`` with the other ranks of the group. Whether all have come to it."""
        if self.world.settings.of_unit == 1:
            return True
        try:
            found = self.rank.together.get(self._met.generation)
            if found is None:
                raise Broken("left the ranks with which it computes")
            self._met.shards += 1
            yield from self.rank.point("collective")
            met = yield found[0].exchange(self.rank.member, ("shard", self._met.shards), (step, shard))
            self.world.watch.computed_together(self.rank, met)
        except Broken as lost:
            self._met.lost = str(lost)
            return False
        return True

    # ---- reduce --------------------------------------------------------------------------------------------------------------------------

    def _reduce(self, move: moves.Reduce) -> Steps:
        yield from self.layout.flush()
        if self._met.lost:
            raise Broken(self._met.lost)
        view, group = self.machine.view, self.rank.group
        number, self._number = self._number, self._number + 1
        if move.early:
            arriving = self.machine.arriving
            assert arriving is not None
            values = yield group.reduce(self.rank.member, number, (arriving.state, None, {}, move.offer))
        else:
            values = yield from self._summed(view, group, number, move.offer)
        self.world.watch.reduced(self.rank, view, number, values)
        column = view.column_of(self.rank.member).members
        held = [values[member][1] for member in column if values[member][1] is not None]
        if self.layout.kept is None and self.replica_check.differ(held):
            raise Broken("weights differ")
        if not move.early:
            yield from self.rank.point("reduced")
        return Sum(number, values, column)

    def _summed(self, view: View, group: SimGroup, number: int, offer: Offer) -> Steps:
        rank, layout, state = self.rank, self.layout, self.machine.here
        yield from rank.point("reducing")
        self.world.watch.contribute(rank, view, state, rank.protocol.dirty)
        if layout.kept is None:
            self.replica_check.enter(state, f"{layout.weights} {rank.protocol.coordinate}")  # other columns hold other parts
        values = yield group.reduce(rank.member, number, (state, layout.weights, dict(layout.held), offer))
        took_s = self.world.clock.now_s - group.complete_s
        if rank.pace.link > 1:
            yield took_s * (rank.pace.link - 1)
        self._own.append(took_s * rank.pace.link)
        return values

    def _compare_chunks(self, column: Column, said: Mapping[Member, Row]) -> None:
        kept = [[index for _, index in self.layout.kept.cut.kept(rank)] for rank in range(len(column.members))]
        rows = [said[member] for member in column.members]
        if len(rows) > 1 and self.chunk_check.differ(column.rank_of(self.rank.member), kept, rows):
            raise Broken("chunks differ")
        self.chunk_check.open = None

    # ---- vote ----------------------------------------------------------------------------------------------------------------------------

    def _cast_vote(self, move: moves.CastVote) -> Steps:
        assert isinstance(move.reduced, Sum)
        rank, members, self.sums = self.rank, self.machine.view.members, move.reduced.merged
        if not self.vote.spread:
            return Words((self.layout.word(self.sums),))
        if self.layout.kept is None:
            return (yield from self._words(move.reduced))
        self.sums = self.layout.summed(self.sums)
        yield from self.layout.kept.arrive()
        yield from rank.point("ready")
        here, kept, column = self.machine.here, self.layout.kept, self.machine.view.column_of(rank.member)
        digests, kept.digested_at = kept.digests, here
        numbers = [index for _, index in kept.cut.kept(column.rank_of(rank.member))]
        row = self.chunk_check.enter(here, digests, numbers, kept.cut.size), digests
        self.replica_check.enter(here, str(self.layout.compared))
        word = self.layout.word(self.sums), row, self.layout.compared
        said: dict[Member, tuple[bool, Row, int]] = {}
        if voters := self.vote.voters(len(members)):
            said = yield rank.group.exchange(rank.member, ("sums", move.reduced.number), word, column.members)
            self._compare_chunks(column, {member: each[1] for member, each in said.items()})
            if self.replica_check.differ([each[2] for each in said.values()]):
                raise Broken("weights differ")
            if len(column.members) < len(members):  # it says that it is ready when its column has found no difference
                finite = all(each[0] for each in said.values()), row, self.layout.compared
                said = yield rank.group.exchange(rank.member, ("ready", move.reduced.number), finite)
        yield from rank.point("decided")
        return Words(tuple(said[members[each]][0] for each in voters))

    def _words(self, reduced: Sum) -> Steps:
        """The words of all ranks, where each column has a whole state."""
        yield from self.rank.point("ready")
        word = self.layout.word(self.sums)
        said: dict[Member, bool] = yield self.rank.group.exchange(self.rank.member, ("ready", reduced.number), word)
        yield from self.rank.point("decided")
        return Words(tuple(said[member] for member in self.machine.view.members))

    def _compute_anew(self, move: moves.Repeat) -> None:
        self.world.note("again", self.rank, move.doubt.why)
        self.layout.reset()
        self.layout.repeat()
        self.duties.begin_step()
        if self._met.pipeline is not None:
            self._met.pipeline.begin_step(self.machine.here)

    # ---- apply and publish ---------------------------------------------------------------------------------------------------------------

    def _apply(self, move: moves.Apply) -> Steps:
        assert isinstance(move.reduced, Sum)
        self.world.watch.agreed(self.rank, self.machine.view, move.reduced.number, move.enter, move.save)
        apply_s = yield from self._change(turns=True)
        if self.layout.kept is None:
            self._note_times(self.machine.here.step, apply_s)

    def _follow(self, move: moves.Advance) -> Steps:
        """Take a step that other ranks have already taken."""
        yield from self._change(turns=False)
        self.layout.followed()

    def _change(self, *, turns: bool) -> Steps:
        """Change the state by this rank's sums. Gives the seconds that it took. ``turns``: all ranks take the step together."""
        before = self.layout.take_out()
        self.layout.reset()
        yield from self.rank.point("mutating")
        apply_s = self.rank.rng.uniform(0.001, 0.02)
        yield apply_s
        value, here = updated(before, self.sums, self.world.settings.shards), self.machine.here
        self.duties.at = StateId(here.history, here.step + 1)
        self.duties.begin_step()
        if self._met.pipeline is not None:
            self._met.pipeline.begin_step(self.duties.at)
        self.rank.movement.at_s = self.world.clock.now_s
        self.layout.put_back(value, self.duties.at, turns=turns)
        self._changed = self.duties.at
        return apply_s

    def _committed(self, move: moves.StepCommitted) -> Steps:
        yield from self.layout.publish()
        if self.layout.kept is not None:
            self.chunk_check.settle(self.machine.here, self.layout.kept.digests)
            self.layout.kept.settled_at = self.machine.here
        yield from self.rank.point("committed")

    def _between(self, move: moves.Attempted) -> Steps:
        """Run the loop body's own code behind a commit."""
        every, lasts_s = self.world.plan.between_s
        here, moved = self.rank.protocol.state, self.rank.movement
        if here is not None and here == self._changed and self.world.plan.ends(here.step, self.rank.protocol.slot):
            yield from self.rank.point("ending")
            yield from self.machine.end("behind the step")
        evaluates, all_look = self.world.plan.evaluates
        if evaluates and here is not None and here == self._changed != self._evaluated and here.step % evaluates == 0:
            self._evaluated = here
            if all_look or self._is_first:
                lease = Lease(self.machine, self.world.settings.timeouts.resend_s)
                yield from self.rank.carry(lease.do(key_of(here, EVALUATION)))
        if every and here is not None and here.step % every == 0 and here != self._rested:
            self._rested = here
            moved.between, moved.at_s = True, self.world.clock.now_s
            half_s = self.rank.rng.uniform(0.4, 0.6) * lasts_s
            yield half_s
            yield from self.rank.point("between")
            yield half_s
            self.rank.movement.between = False

    @property
    def _is_first(self) -> bool:
        view = self.rank.protocol.view
        return view is not None and view.rank_of(self.rank.member) == 0

    def _note_times(self, step: int, apply_s: float) -> None:
        """Note the times of whole steps alone, like the agent of a live rank."""
        whole, first = len(self._own) == 3 and self._own[0] == len(self.duties.mine), self._first
        self._first = first and not self._own
        if first or not whole:
            return
        view = self.rank.protocol.view
        if view is not None and view.generation != self.rank.timed.generation:
            self.rank.timed = TimedSteps(view.generation)
        shards, compute_s, network_s = self._own
        seconds = (compute_s, 0.0, network_s, apply_s, self._waited_s)
        self.rank.timed.rows.append((step, int(shards), *(round(each * 1e6) for each in seconds)))

    # ---- beside the steps, and after them ------------------------------------------------------------------------------------------------

    def _save(self, move: moves.Save) -> Steps:
        view = self.machine.view
        self.world.watch.save(self.rank, view, move.request, self.machine.here)
        yield from self.rank.point("saving")
        yield from self._write(view, move.request)

    def _keep_beside(self, order: Keep) -> Steps:
        """Write the rank's part of its state in a separate thread, which works even if the loop hangs."""
        view = View(order.generation, order.members, (), 0, (), order.state, "")
        self.world.watch.save(self.rank, view, order.request, self.machine.here)
        try:
            if self.rank.at("saving") and self.rank.still.stopped:
                yield 0.0
        except Dead:
            return
        yield from self._write(view, order.request)

    def _write(self, view: View, request: int) -> Steps:
        rank, state, weights, blocked_s = self.rank, self.machine.here, self.layout.weights, self.rank.rng.uniform(0.001, 0.02)
        yield blocked_s
        place = view.rank_of(rank.member)
        name = f"step-{state.step}-history-{state.history}-request-{request}-g{view.generation}"
        part = Part(f"{name}/{place}", 1, str(weights), (place,))
        event = PartWritten(rank.member, request, name, state, part, blocked_s, "meta" if place == 0 else "")
        self.world.clock.after(rank.rng.uniform(0.01, 0.4), lambda: rank.gate(lambda: self._written(view, place, weights, event)))

    def _written(self, view: View, place: int, weights: int, event: PartWritten) -> None:
        end, gate = self.rank.end, self.rank.gate
        if level_of(event.request) == PEERS:
            self._answered(event, self.world.copy(end, view, place, weights, event))
        else:
            self.world.store.put(end, event.checkpoint, place, weights, lambda done: gate(lambda: self._answered(event, done)))

    def _answered(self, event: PartWritten, done: bool) -> None:
        if done:
            self.rank.protocol.written(event)
            self.rank.flush()
        elif self.rank.rng.random() < 0.5:  # otherwise the message is lost, and the request runs out of time
            self.rank.flush(PartFailed(event.member, event.request, "no store takes it"))

    def _digest(self, move: moves.Digest) -> str:
        self.rank.movement.stepping = False
        self.world.note("finished", self.rank)
        return str(self.layout.weights)

    def _carry_out(self, move: moves.CarryOut) -> Steps:
        if EVALUATION in move.key:
            yield from self.layout.evaluate()
        yield self.rank.rng.uniform(0.01, 0.3)
        self.world.watch.did(self.rank, move.key)
        return str(self.layout.weights)
