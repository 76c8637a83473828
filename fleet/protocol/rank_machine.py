"""A rank's work between messages: it joins a view, detaches, speculates, claims its place, votes, enters the next view, finishes.

Pure: live ranks and simulated ranks use this same object. The driver gives the coordinator's messages to :meth:`RankMachine.receive`.
``orders`` collects work to do at once, as the protocol's ``outbox`` collects messages to send. Generators ask for longer work: they yield
*moves*, and get back the results, or a ``GroupLost`` if the group of the view was lost meanwhile. See :mod:`fleet.protocol.moves`.

The driver holds one lock for every call, and for every resumption of a generator. None of them waits.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from fleet.errors import FleetError, GroupLost, LoopError, RunOver
from fleet.protocol.chunks import ViewState
from fleet.protocol.duties import Duties
from fleet.protocol.instructions import Instruction
from fleet.protocol.member import INTERRUPT, MemberProtocol, Offer
from fleet.protocol.moves import (
    Apply,
    Arriving,
    AssignShards,
    Attempted,
    Awaited,
    Begin,
    CastVote,
    Clear,
    Compute,
    Digest,
    Drop,
    Expect,
    Facts,
    Form,
    Give,
    Hold,
    HoldStill,
    Joining,
    KeepBeside,
    Load,
    Meet,
    Move,
    Order,
    Parting,
    Promise,
    Receive,
    Reduce,
    Reduced,
    Rehearse,
    Repeat,
    Reset,
    Resettle,
    Save,
    Settle,
    StepCommitted,
    ViewJoined,
    Wait,
    Wake,
)
from fleet.protocol.probes import probe
from fleet.protocol.types import Finding, StateId, View
from fleet.protocol.vote import CommitVote, Doubt

Moves = Generator[Move, Any, Any]


class RankMachine:
    """One rank's steps through the views of a run.

    Between the attempts at a step the loop computes, and does not need its group. Then the rank is *detached*: its listening thread
    answers when the rank is called out of its view, and joins the next one. So a change of views costs no time while the loop has work.
    The loop comes in person when it wants to reduce, and early (``wanted``) when its state has to be changed.

    Attributes:
        orders: work for the driver to do at once; the driver empties the list.
        membership: the view in whose group this rank is; None when it is in none.
        joining: the view that the rank is joining.
        ahead: the proposal whose group forms beside the running steps.
        arriving: the state that is on its way to the rank.
        goes_ahead: the loop computes speculative shards before the rank has joined.
        total: steps of the run. ``together``: so many steps belong together, with no checkpoint and no stop between them.
    """

    def __init__(self, protocol: MemberProtocol) -> None:
        self.protocol = protocol
        self.duties, self.vote = Duties(0), CommitVote(spread=False)
        self.facts: Facts
        self.total, self.together = 0, 1
        self.orders: list[Order] = []
        self.membership: View | None = None
        self.joining: Joining | None = None
        self.ahead: View | None = None
        self.arriving: Arriving | None = None
        self.goes_ahead = False
        self._early: Reduced | None = None
        self._summing = False
        self._taken: StateId | None = None
        self._passed: StateId | None = None

    def serve(self, facts: Facts, duties: Duties, vote: CommitVote, total: int, together: int = 1) -> None:
        """Prepare to train for ``total`` steps. No view calls this rank before :meth:`run`.

        Args:
            facts: the facts of this rank.
            duties: the rank's shards; the driver assigns them on :class:`AssignShards`.
            vote: the rank's vote; the driver brings the ranks' words, and follows the vote on sums and factor.
        """
        self.facts, self.duties, self.vote, self.total, self.together = facts, duties, vote, total, together

    @property
    def over(self) -> bool:
        """The run is over for this rank."""
        return self.protocol.released is not None

    @property
    def wanted(self) -> bool:
        """The loop has to come with its computed shards, since the listening thread cannot answer for it."""
        return self.protocol.interrupted or (self.protocol.ends_here and self.protocol.detached) or self._joins_in_person

    @property
    def called_in(self) -> bool:
        """With sharded state, between two steps: the next view waits for this rank's loop, since the rank's chunks have to move."""
        between = self.protocol.sharded and self.protocol.state is not None and not self.protocol.concluded
        return between and (self.protocol.interrupted or self._joins_in_person)

    @property
    def _joins_in_person(self) -> bool:
        return self.joining is not None and not self.joining.beside

    @property
    def outside(self) -> bool:
        """This rank is in no group, and waits for its next view."""
        return self.membership is None

    @property
    def assigned(self) -> tuple[int, ...]:
        """The shards that this rank has yet to compute for the step at hand."""
        return self.duties.assigned(self.facts.held)

    @property
    def here(self) -> StateId:
        """The state that this rank holds."""
        assert self.protocol.state is not None
        return self.protocol.state

    @property
    def view(self) -> View:
        """The view that this rank has joined."""
        assert self.protocol.view is not None
        return self.protocol.view

    # ---- the listening thread ------------------------------------------------------------------------------------------------------------

    def receive(self, *messages: Instruction) -> None:
        """Take messages of the coordinator."""
        interrupt = INTERRUPT in [self.protocol.receive(message) for message in messages]
        self.look_ahead()
        if (order := self.protocol.to_keep()) is not None:
            self.orders.append(KeepBeside(order))
        self._wake_at_the_end()
        if interrupt and self.protocol.interrupted:  # the loop may wait in these groups: wake it, and it will leave
            for view in (self.membership, self.joining.view if self.joining is not None else None):
                if view is not None:
                    self.orders.append(Wake(view.generation))

    def _wake_at_the_end(self) -> None:
        """Wake this rank out of a sum that never ends: another rank's loop has ended the run, and takes no further step."""
        if self._summing and self.protocol.ends_here and self.membership is not None:
            probe("a rank is woken as another one has ended the run")
            self.orders.append(Wake(self.membership.generation))

    def _sum(self, *, early: bool = False) -> Moves:
        """Sum the step. Raises GroupLost, also where a loop has ended the run at the present state meanwhile."""
        self._summing = True
        try:
            self._wake_at_the_end()
            return (yield Reduce(self._offer(), early=early))
        finally:
            self._summing = False

    def look_ahead(self) -> None:
        """Begin the work that can go on beside the loop: form the group of a proposal, or join the next view for a detached rank."""
        self._sweep()
        if self.ahead is not None and not self.protocol.holds_proposal(self.ahead.generation):
            self._drop_ahead()
        if self.protocol.detached and self.protocol.view is None and (view := self.protocol.next_view()) is not None:
            self._begin_join(view, beside=self._settles_detached(view))
        proposal = self.protocol.proposal()
        if self.protocol.view is not None and not self.protocol.forming and proposal is not None and self.ahead is None:
            self.ahead = proposal
            self.orders.append(Form(proposal))

    def _sweep(self) -> None:
        """Give up groups of other views than the rank's: the rank was called out while it was detached."""
        view = self.protocol.view
        held = (self.membership, self.joining.view if self.joining is not None else None)
        if any(one is not None and (view is None or one.generation != view.generation) for one in held):
            self._drop_membership()

    def _drop_membership(self, parting: Parting = Parting.LEFT) -> None:
        for view in (self.membership, self.joining.view if self.joining is not None else None):
            if view is not None:
                self.orders.append(Drop(view.generation, parting))
        self.membership = self.joining = None

    def _drop_ahead(self) -> None:
        if self.ahead is not None:
            self.orders.append(Drop(self.ahead.generation, Parting.WITHDRAWN))
            self.ahead = None

    def _settles_detached(self, view: View) -> bool:
        """Whether the rank can join without its loop. The loop has to come where its state has to change, or must not change."""
        return self.protocol.settles_detached(view, steady=self.facts.steady)

    def _begin_join(self, view: View, *, beside: bool = False, stands_by: bool = False) -> Joining:
        self.joining = joining = Joining(view, beside, stands_by)
        self.orders.append(Form(view))
        if beside:
            self._speculates(view)
            self.orders.append(Settle(joining))
        return joining

    def _speculates(self, view: View) -> bool:
        """Whether the loop can compute shards of the present step while the group of ``view`` forms. They are in ``assigned``."""
        state, member = self.protocol.state, self.protocol.member
        if state is None or state.step >= self.total or self.protocol.ends_here:
            return False
        column = view.column_of(member)
        idle = column.idle if self.facts.spares_newcomers else ()
        return self.duties.speculate(column, member, state, idle) and bool(self.assigned)

    def settle(self, joining: Joining) -> Moves:
        """Join beside the loop, which computes its shards and comes only after them."""
        view, state = joining.view, self.here
        try:
            yield Meet(view)
            self._check(joining)  # of two views, the promise to the later one alone counts
            joining.promised = True
            yield Promise(view, self.duties.promised)
            if self.protocol.gives(view):
                yield Give(view, state, view.column_of(self.protocol.member).receivers)
            self._check(joining)
            self.protocol.formed(state)
        except GroupLost as error:
            probe("a view is lost that was joined beside the loop")
            joining.error = str(error)
            if self.joining is joining and self.protocol.detached:
                self._drop_membership()
                self.protocol.broken(str(error))
        finally:
            joining.done = True

    # ---- a state on its way to this rank -------------------------------------------------------------------------------------------------

    def receiving(self, view: View) -> None:
        """This rank's state is about to be overwritten. Raises GroupLost if the rank has left the view, and has reported its state."""
        self._check_joined(view)
        self.protocol.receiving()

    def received(self, view: View, state: StateId) -> None:
        """This rank has received the whole state. Raises GroupLost if it has left the view."""
        self._check_joined(view)
        self.protocol.formed(state)
        self._wake_at_the_end()

    def _check_joined(self, view: View) -> None:
        if self.protocol.view is not view:
            raise GroupLost("left meanwhile", view.generation)

    # ---- the loop ------------------------------------------------------------------------------------------------------------------------

    def run(self) -> Moves:
        """Train from the built model to the last step. Gives true where the code behind the loop has to run.

        The rehearsal loads, compiles and allocates, however long that takes. No view calls the process before it is done.
        """
        if not self.over:
            yield Rehearse()
        self.protocol.ready(self.facts.apart)
        while (yield from self._join_next()):
            while not self.over and not self._at_the_end:
                step = self.here.step
                yield Compute(step)
                yield from self._attempt(step)
                yield Attempted()
                self._passed = self._taken
            if not self.over and (yield from self._finish()):
                return True
        return False

    @property
    def _at_the_end(self) -> bool:
        """No step follows: the last step is taken, all ranks have agreed to halt here, or a loop has ended the run here."""
        return self.here.step >= self.total or self.protocol.halted or (self.protocol.ends_here and not self._contradicts)

    @property
    def _contradicts(self) -> bool:
        """Another rank's loop has ended the run here, and this rank's loop has gone on. It may still end the run before it commits."""
        ended = self.protocol.ended
        return ended is not None and not ended.own and self._passed == self.here

    def detach(self) -> None:
        """The loop goes on, and does not need its group."""
        self.protocol.detach()
        self.look_ahead()

    def claim(self) -> bool:
        """The loop comes in person. False when it has to join a view first."""
        self.protocol.detached = False
        return self.protocol.view is not None and not self.protocol.interrupted and self.joining is None and self.membership is not None

    def leave(self, reason: str, testimony: Finding | None = None, *, within_step: bool = False) -> Moves:
        """Give up the group. Report this rank's state to the coordinator, and with ``testimony`` its difference from other ranks."""
        self._drop_membership()
        self._drop_ahead()
        self.arriving = None
        self.protocol.broken(reason, testimony)
        yield Clear(within_step)

    def rejoin(self, reason: str) -> Moves:
        """Between two steps, leave a useless group and join the next view. Raises RunOver where no view follows for this rank."""
        if self.claim() or self.protocol.view is not None:
            yield from self.leave(reason)
        if not (yield from self._join_next()):
            raise RunOver

    def _join_next(self) -> Moves:
        """Join a view with its group and the shards of the present step, or first compute shards. False: the run is over for this rank."""
        yield Hold()
        if self._early is not None:  # the view of this sum is gone: other ranks have taken the step, or will sum it again
            self._early = None
            yield Reset()
        while (yield from self._await_join()):
            if self.goes_ahead:
                self.detach()
                return True
            view = self.view
            try:
                yield AssignShards(view, begun=True)
                yield from self._reduce_early()
            except GroupLost as error:
                if self.arriving is not None:
                    probe("a receiver loses its group while its state is on the way")
                    yield Reset()
                yield from self.leave(str(error))
                continue
            self.detach()  # the coordinator may have called the rank out meanwhile
            yield ViewJoined(view)
            return True
        return False

    def _await_join(self) -> Moves:
        """Wait for a call into a view and join it, or compute speculative shards before that. False: the run is over for this rank."""
        self.protocol.detached = self.goes_ahead = False
        while True:
            if self.protocol.interrupted and self.protocol.view is not None:
                yield from self.leave("told to leave")
            yield Wait(Awaited.CALL, lambda: self.over or self.protocol.called or self.joining)
            if self.over:
                return False
            if (joining := self.joining or self._called()) is None:
                continue
            self.goes_ahead = joining.beside and not joining.promised and self._speculates(joining.view)
            if self.goes_ahead:
                return True
            try:
                yield from self._join(joining)
                return True
            except GroupLost as error:
                yield from self.leave(str(error))

    def _called(self) -> Joining | None:
        """The view to join now, or None."""
        if (view := self.protocol.next_view()) is not None:
            return self._begin_join(view, beside=self._settles_detached(view) and self._speculates(view))
        if (view := self.protocol.proposal()) is not None:  # a newcomer stands by, beside the running steps, until the members come
            self.protocol.enter(view)
            return self._begin_join(view, stands_by=True)
        return None

    def _join(self, joining: Joining) -> Moves:
        """The loop joins, or completes a join that was made beside it."""
        if joining.beside:
            yield Wait(Awaited.SETTLED, lambda: joining.done)
            if joining.error:
                raise GroupLost(joining.error, joining.view.generation)
        self._check(joining)
        yield Meet(joining.view, joining.stands_by)
        self._check(joining)
        self.membership, self.joining = joining.view, None
        if not joining.beside:
            yield from self._exchange(joining.view)

    def _check(self, joining: Joining) -> None:
        """Raises GroupLost where the rank was told to leave: the message may have come before the loop waited in the group."""
        if self.protocol.interrupted or self.protocol.view is not joining.view:
            raise GroupLost("told to leave", joining.view.generation)

    def _exchange(self, view: View) -> Moves:
        """Ranks give their state to those that lack it, and the others go on. A rank reports ``Formed`` once it holds the state."""
        state, column = self.protocol.state, view.column_of(self.protocol.member)
        me = column.rank_of(self.protocol.member)
        if me == column.donor not in column.receivers and self.protocol.begins(view):
            yield from self._begin(view)
            state = view.state
        if self.protocol.sharded:
            met = yield Resettle(view)
            self.vote.begin()
        else:
            giver, receivers = column.donor if me in column.receivers else -1, column.receivers if me == column.giver else ()
            met = ViewState(state or view.state, giver, receivers)
        if met.giver >= 0:
            self.arriving = yield Receive(view, met.giver)
            return
        if met.receivers:
            yield Give(view, met.state, met.receivers)
            if not self.facts.steady:
                yield HoldStill()
        self.protocol.formed(met.state)

    def _begin(self, view: View) -> Moves:
        """No rank held a clean state: the donor starts from the checkpoint, or from the initial state of its train function."""
        loaded = None
        if view.checkpoint is not None:
            loaded = yield Load(view)
            self.protocol.receiving()
        elif self.protocol.state is not None or self.protocol.dirty:
            raise FleetError("there is no checkpoint to go back to, and this rank's initial state is gone: a fresh process has to begin")
        yield Begin(view, loaded)
        self.protocol.begun(view.state)
        self.vote.begin()

    def _reduce_early(self) -> Moves:
        """A newcomer waits for its state. If it brings no shards to the present step, it takes part in the sum before its state is there.

        The loop body runs after that, without a batch and with the state in place: it may set a learning rate.
        """
        arriving, early = self.arriving, None
        if arriving is None:
            return
        ended = self.protocol.ended is not None and self.protocol.ended.state == arriving.state
        if arriving.alike and not self.duties.mine and arriving.state.step < self.total and not ended:
            early = yield from self._sum(early=True)
        yield HoldStill()
        self.arriving, self._early = None, early

    def _offer(self) -> Offer:
        """This rank's offer at the next step boundary; see ``MemberProtocol.offer``."""
        if self.ahead is not None and self.facts.formed(self.ahead.generation):
            self.protocol.proposal_formed(self.ahead.generation)
        here = self.arriving.state if self.arriving is not None else self.here
        return self.protocol.offer(between=bool((here.step + 1) % self.together))

    # ---- a step --------------------------------------------------------------------------------------------------------------------------

    def _attempt(self, step: int) -> Moves:
        """Reduce, vote on and apply one step. It ends early where the loop body has to run first: for lost shards, or from another state.

        A view may break and another begin in here: the rank waits for it, and brings its computed shards into it.
        """
        while True:
            if self.protocol.ends_here:
                self._check_end()
                return
            if not self.claim():
                joined = yield from self._join_next()
                if not joined or self.assigned or self.here.step != step:
                    return
                continue
            try:
                reduced = self._early or (yield from self._sum())
                self._early = None
                yield HoldStill()
                doubt = None if reduced.disputed else (yield from self._vote(reduced))
            except GroupLost as error:
                self.vote.lost()
                self.protocol.withdraw()
                yield from self.leave(str(error), self.facts.testimony, within_step=True)
                continue
            if not reduced.disputed:
                yield from self._conclude(reduced) if doubt is None else self._compute_anew(doubt)
                return
            self.protocol.withdraw()
            yield Hold()
            if self.facts.checks:
                self.detach()
                return

    def end(self, reason: str) -> Moves:
        """The loop ends the run after the present state: no rank takes a further step."""
        self.protocol.end(reason)
        yield from ()

    def _check_end(self) -> None:
        """Raises LoopError where another rank's loop has ended the run at this state, and this rank's loop takes a further step."""
        ended = self.protocol.ended
        if ended is None or not self._contradicts:
            return
        probe("a loop goes on from where another one has ended the run")
        raise LoopError(
            f"step {ended.state.step}: the loop of rank {ended.by} has ended the run there ({ended.reason}), and that of rank "
            f"{self.protocol.member} goes on. All ranks have to end it at the same step. Decide by values that are the same on all ranks: "
            "step.loss, figures of run.evaluate, or fleet.EarlyStopping. Use no clock, no random number and no loss of one rank"
        )

    def _vote(self, reduced: Reduced) -> Moves:
        """The doubt against the step; None: it is taken. Raises GroupLost: if this rank was ready, the next view tells the result."""
        if reduced.doubt is not None:
            return self.vote.reject(reduced.doubt)
        self.vote.ready()
        words = yield CastVote(reduced)
        return self.vote.decide(words, reduced.norm_limit)

    def _compute_anew(self, doubt: Doubt) -> Moves:
        """All ranks have rejected the step."""
        self.protocol.withdraw()
        yield Repeat(doubt)
        self.vote.begin()
        self.detach()

    def _conclude(self, reduced: Reduced) -> Moves:
        """All ranks have accepted the step: take it, then save or enter the next view, as agreed."""
        enter, save = self.protocol.agree(list(reduced.offers))
        try:
            yield from self.take_step(Apply(reduced, enter, save))
            yield StepCommitted(reduced)
        except GroupLost as error:  # the step is applied here, and other ranks lack parts of it: the next view brings them
            probe("a step is taken and the group is lost before all have it")
            yield from self.leave(str(error))
            yield from self._join_next()
            return
        if save is not None:
            yield Save(save)
        if enter is not None and self.protocol.member in enter.members:
            yield from self._enter(enter)
        elif enter is not None:
            yield from self._stand_by(enter)
        else:
            yield Expect()
            self.detach()

    def take_step(self, move: Move) -> Moves:
        """``move`` changes the state by one step."""
        self.protocol.mutating()
        yield move
        self._taken = self.protocol.committed()
        self.vote.begin()

    def _enter(self, view: View) -> Moves:
        """At the agreed step boundary, enter the proposed view, whose group has formed beside the running steps."""
        try:
            self.protocol.enter(view)
            ahead, self.ahead = self.ahead, None
            if ahead is None:
                probe("a rank is told to leave before it enters the agreed view")
                raise GroupLost("told to leave before the agreed view was entered", view.generation)
            self._drop_membership(Parting.AGREED)
            self.joining = joining = Joining(view)
            yield from self._join(joining)
            yield AssignShards(view, begun=False)
            self.detach()
            yield ViewJoined(view)
        except GroupLost as error:
            probe("an agreed view is lost while it is entered")
            yield from self.leave(str(error))
            self.detach()  # the listening thread answers the next call, while the loop computes

    def _stand_by(self, view: View) -> Moves:
        """At the agreed step boundary, the others enter ``view`` without this rank, which waits for a later one."""
        self._drop_membership(Parting.AGREED)
        self.protocol.stand_by(view)
        yield Clear()
        yield from self._join_next()

    # ---- the end -------------------------------------------------------------------------------------------------------------------------

    def _finish(self) -> Moves:
        """Wait at the barrier until all ranks hold the last state, and it is kept. False when this view ended before."""
        protocol = self.protocol
        if not self.claim():
            return False
        try:
            digest = yield Digest()
        except GroupLost as error:
            yield from self.leave(str(error))
            return False
        protocol.finished(digest)
        while not (protocol.interrupted or protocol.concluded):
            if (request := protocol.final_request()) is not None:
                yield Save(request, still=True)
            yield Wait(Awaited.BARRIER, lambda: protocol.interrupted or protocol.concluded or protocol.asked_to_save)
        if not self.over and not protocol.concluded:
            yield from self.leave("told to leave at the finish barrier")
        return protocol.concluded and not self.over

    def close(self) -> Moves:
        """The code behind the loop is done: wait until the run is over."""
        if not self.over:
            self.protocol.left()
        yield Wait(Awaited.RELEASE, lambda: self.over)
