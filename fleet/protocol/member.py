"""The rank's half of the membership protocol. It is pure: the simulator runs the same object as a live rank.

A rank gives it instructions (``receive``), asks it for the next action (``next_view``, ``agree`` ...), and reports events of its own.
``outbox`` collects the messages to the coordinator. No code here blocks, reads a clock or knows torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fleet.protocol.causes import Departure, Engaged
from fleet.protocol.events import Event, Finished, Formed, Joined, Left, OnceDone, OnceWanted, PartFailed, PartWritten, Quiesced, Ready
from fleet.protocol.instructions import (
    Cancel,
    Conclude,
    EndAt,
    Fence,
    Halt,
    Instruction,
    Keep,
    OnceAnswer,
    Propose,
    Publish,
    Quiesce,
    Release,
    SaveCheckpoint,
    Welcome,
)
from fleet.protocol.levels import LEVELS, level_of
from fleet.protocol.probes import probe
from fleet.protocol.types import Coordinate, Finding, Member, Process, StateId, View

NOTHING, INTERRUPT = "", "interrupt"

Offer = tuple[int, ...]
"""A rank's offer at a step boundary; see :meth:`MemberProtocol.offer`."""
NO_VIEW, LAST_STEP = -1, -2
"""Values in the place of a proposal's generation: the rank has formed no proposal; the rank was told to halt."""


@dataclass(slots=True)
class StandingProposal:
    """A view to form beside the running steps. ``formed``: its group is, or this rank is not in it. ``offered`` at a boundary, and maybe
    ``cancelled`` since then."""

    view: View
    formed: bool = False
    offered: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class ViewOrders:
    """The orders to this rank in its view, and their progress.

    ``saves``: by level, the newest checkpoint request; ``served``: requests that are done; ``part``: the part written last. ``halt``: the
    rank has to stop at a boundary; ``halted``: all members do. ``incomplete``: no member holds some part of a sharded state. ``keep``: the
    order to write beside the loop now.
    """

    saves: dict[str, int] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    part: PartWritten | None = None
    halt: bool = False
    halted: bool = False
    incomplete: bool = False
    keep: Keep | None = None


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """The loop of ``by`` has ended the run after ``state``. ``own``: ``by`` is this rank."""

    state: StateId
    by: Member
    reason: str
    own: bool


class MemberProtocol:
    """One rank process's side of the protocol.

    Args:
        slot: the slot that this process fills.
        token: drawn once by the process; makes a doubled hello harmless.
        process: the address by which the node's agent signals the process.
        store: address of the key-value store that the process offers for rendezvous.

    Attributes:
        coordinate: this rank's place among the ranks that compute a shard together; empty where it has none, or none yet.
        alone: the loop evaluates, or does a task for all ranks (``run.once``).
        sharded: no rank has the whole state: its ranks agree on one when a view begins, and parts of it move.
        concluded: all members have committed the last step, and it is kept: the code behind the loop may run.
        ended: the end of the run by a loop, with its state; None: no loop has ended it. It outlives views, since a later view may begin at
            that state.
        answers: the coordinator's answers on tasks that one rank does for all, by key; see ``fleet.protocol.once``.
    """

    def __init__(self, slot: int, token: str, process: Process, store: str) -> None:
        self._hello = Joined(slot, token, process, store, None)
        self.outbox: list[Event] = []
        self.state: StateId | None = None
        self.dirty = False
        self.view: View | None = None
        self.released: str | None = None
        self.fenced: str | None = None
        self.floor = -1
        self.detached = self.alone = False
        self.sharded = False
        self.concluded = False
        self.ended: LoopEnd | None = None
        self.answers: dict[str, OnceAnswer] = {}
        self._in_person = False
        self._status: Event | None = None
        self._pending: View | None = None
        self._proposal: StandingProposal | None = None
        self._orders = ViewOrders()

    @property
    def slot(self) -> int:
        return self._hello.slot

    @property
    def incarnation(self) -> int | None:
        return self._hello.incarnation

    @property
    def coordinate(self) -> Coordinate:
        return self._hello.coordinate

    def name(self, incarnation: int | None, coordinate: Coordinate = ()) -> None:
        """By these the coordinator knows this process from now on."""
        self._hello = replace(self._hello, incarnation=incarnation, coordinate=coordinate)

    @property
    def token(self) -> str:
        return self._hello.token

    @property
    def process(self) -> Process:
        return self._hello.process

    @property
    def member(self) -> Member:
        if self.incarnation is None:
            raise RuntimeError(f"slot {self.slot} was not yet welcomed by the coordinator")
        return Member(self._hello.slot, self.incarnation, self.coordinate)

    @property
    def forming(self) -> bool:
        """The rank has joined a view, and has not yet reported ``Formed``."""
        return self.view is not None and self._status is None

    @property
    def halted(self) -> bool:
        """The run stops, and all members of the view have agreed that the step just taken is the last."""
        return self._orders.halted

    @property
    def ends_here(self) -> bool:
        """A loop has ended the run after the state that this rank holds."""
        return self.ended is not None and self.ended.state == self.state and not self.dirty

    @property
    def generation(self) -> int:
        """The generation of this rank's view, or the greatest that the rank has left."""
        return self.view.generation if self.view else self.floor

    @property
    def interrupted(self) -> bool:
        """The rank must stop its work in the process group: it was told to leave, or the run is over for it."""
        return self.released is not None or self.fenced is not None or (self.view is not None and self.view.generation <= self.floor)

    @property
    def waits(self) -> bool:
        """The rank can only wait for the coordinator. It repeats its status meanwhile."""
        if isinstance(self._status, Finished):
            return not self.concluded
        return self.incarnation is None or self.view is None or isinstance(self._status, Left)

    @property
    def called(self) -> bool:
        """The rank has to form a view now: a published one, or a proposal while the rank is in no view."""
        return self._pending is not None or (self.view is None and self.proposal() is not None)

    # ---- messages of the coordinator -------------------------------------------------------------------------------------------------

    def hello(self) -> Joined:
        """The first message on every new connection. The rank repeats its last status after it."""
        return self._hello

    def status(self) -> list[Event]:
        """This rank's status, for the coordinator. The rank repeats it while it waits, since messages may be lost."""
        known = [event for event in (self._status, self._orders.part if isinstance(self._status, Finished) else None) if event is not None]
        return [self.hello(), *(known if self.incarnation is not None else [])]

    def receive(self, message: Instruction) -> str:
        """Take one instruction. Returns ``INTERRUPT`` when the process group must be woken from outside, else ``NOTHING``."""
        match message:
            case Welcome(token=token, incarnation=incarnation, coordinate=coordinate) if token == self.token:
                self.name(incarnation, self.coordinate or coordinate)
            case Quiesce(members=members, generation=generation, in_person=in_person) if self._me_in(members):
                return self._on_quiesce(generation, in_person)
            case Publish(view=view):
                self._on_publish(view)
            case Propose(view=view) if self._fits(view):
                self._on_propose(view, leaves=False)
            case Propose(view=view, leaving=leaving) if self._me_in(leaving) and self.view is not None:
                self._on_propose(view, leaves=True)
            case Cancel(members=members, generation=generation) if self._me_in(members):
                self._on_cancel(generation)
            case SaveCheckpoint(members=members, generation=generation, request=request) if self._me_in(members):
                if generation == self.generation:
                    level, saves = level_of(request), self._orders.saves
                    saves[level] = max(saves.get(level, 0), request)
            case Halt(members=members, generation=generation) if self._me_in(members):
                self._orders.halt = self._orders.halt or generation == self.generation
            case EndAt(members=members) if self._me_in(members):
                self._on_end(message)
            case Keep(members=members) if self._me_in(members):
                self._on_keep(message)
            case Conclude(members=members, generation=generation) if self._me_in(members):
                self._on_conclude(generation)
            case OnceAnswer(members=members, key=key) if self._me_in(members):
                self.answers[key] = message
            case Release(members=members, reason=reason) if self._me_in(members):
                self.released = reason
                return INTERRUPT
            case Fence(token=token, reason=reason) if token == self.token:
                self.fenced = reason
                return INTERRUPT
        return NOTHING

    def _me_in(self, members: tuple[Member, ...]) -> bool:
        return self.incarnation is not None and self.member in members

    def _fits(self, view: View) -> bool:
        return self._me_in(view.members) and view.generation > self.floor

    def _on_quiesce(self, generation: int, in_person: bool) -> str:
        if self.concluded:
            probe("a rank behind the loop is told to leave")
            return NOTHING  # behind the loop there is no view to leave; an agent that is cut off does not know this
        self.floor = max(self.floor, generation)
        self._in_person = in_person
        if self._pending and self._pending.generation <= self.floor:
            self._pending = None
        if self._proposal and self._proposal.view.generation <= self.floor:
            self._proposal = None
        if self.view is None:
            self._say_quiesced(Departure.IDLE, "", self._testimony)
            return NOTHING
        if self.view.generation > self.floor:
            return NOTHING
        self._leave_detached()
        return INTERRUPT

    def detach(self) -> None:
        """The loop computes without its group. The listening thread may answer for it until ``detached`` is false again."""
        self.detached = True
        if self.view is not None and self.view.generation <= self.floor:
            self._leave_detached()

    def _leave_detached(self) -> None:
        """Leave the view for a detached loop. With ``in_person`` the loop itself has to come, since it may hang."""
        if self.detached and not self._in_person:
            self.broken("told to leave")

    def _on_keep(self, order: Keep) -> None:
        """The coordinator repeats this order until it has an answer. Outside a view the state does not change, so a thread can read it."""
        part, served = self._orders.part, self._orders.served
        if part is not None and part.request == order.request:
            self.outbox.append(part)
        elif order.request not in served:
            served.add(order.request)
            if self.view is None and not self.dirty and self.state == order.state:
                self._orders.keep = order
            else:
                self.outbox.append(PartFailed(self.member, order.request, f"it holds {self.state}{', half changed' if self.dirty else ''}"))

    def _on_end(self, word: EndAt) -> None:
        if self.ended is None or self.ended.state != word.state:
            self.ended = LoopEnd(word.state, word.by, word.reason, own=False)

    def to_keep(self) -> Keep | None:
        """The order to write beside the loop now. Each order is returned once."""
        order, self._orders.keep = self._orders.keep, None
        return order

    def _on_conclude(self, generation: int) -> None:
        if isinstance(self._status, Finished) and generation == self.generation and not self.interrupted:
            self.concluded, self._status = True, replace(self._status, concluded=True)

    def _on_propose(self, view: View, *, leaves: bool) -> None:
        if view.generation == self.generation:
            self._repeat()  # this rank has entered it already, and the coordinator seems not to know
        elif view.generation > self.generation and not self._offers and not self.holds_proposal(view.generation):
            self._proposal = StandingProposal(view, formed=leaves)

    def _repeat(self) -> None:
        if self._status is not None:
            self.outbox.append(self._status)

    def _on_publish(self, view: View) -> None:
        if self.view is not None and view.generation == self.view.generation:
            self._repeat()
        elif self._fits(view) and view.generation > self.generation:
            self._pending = view

    def _on_cancel(self, generation: int) -> None:
        if self._proposal is None or self._proposal.view.generation != generation:
            return
        if self._proposal.offered:
            probe("a proposal is cancelled while it is offered")
            self._proposal.cancelled = True  # other members may already rely on this offer: the result of the step decides
        else:
            self._proposal = None

    # ---- events of the rank ----------------------------------------------------------------------------------------------------------

    def ready(self, apart: str = "") -> None:
        """The model is built; the rank can be put in a view. ``apart``: see :class:`Ready`."""
        self._say(Ready(self.member, apart))

    def next_view(self) -> View | None:
        """The published view to form now; ``formed`` or ``broken`` must follow."""
        view, self._pending = self._pending, None
        if view is not None:
            self._join(view)
        return view

    def _join(self, view: View) -> None:
        self.view, self._status, self._orders = view, None, ViewOrders()
        if self._proposal and self._proposal.view.generation <= view.generation:
            self._proposal = None

    def receiving(self) -> None:
        """State is about to be overwritten."""
        self.dirty = True

    def incomplete(self) -> None:
        """No member of the view holds some part of a sharded state. This rank keeps its own part: the missing member may only be late."""
        self._orders.incomplete = True

    def begun(self, state: StateId) -> None:
        """A new history begins here: the rank holds the whole ``state``. It keeps it if its group breaks before others have the state."""
        self.state, self.dirty = state, False

    def formed(self, state: StateId) -> None:
        """The process group works and the rank holds ``state``."""
        assert self.view is not None
        self.state, self.dirty = state, False
        self._say(Formed(self.member, self.view.generation, state))

    def broken(self, reason: str, testimony: Finding | None = None) -> None:
        """The rank has left its process group: a peer was lost, the rank had to quiesce, or it saw that ranks differ (``testimony``)."""
        called = self.view is not None and self.view.generation <= self.floor
        reported = testimony if self.view is not None else self._testimony
        if self.view is not None:
            self.floor = max(self.floor, self.view.generation)
        self.view = self._proposal = None
        why = Departure.CALLED if called else Departure.BROKEN
        if self._orders.incomplete:
            why, self._orders.incomplete = Departure.INCOMPLETE, False
        self._say_quiesced(Departure.DIFFERS if testimony is not None else why, reason, reported)

    def mutating(self) -> None:
        """The optimizer is about to touch the state."""
        self.dirty = True

    def committed(self) -> StateId:
        """The state is one step further, and clean."""
        assert self.state is not None
        self.state, self.dirty = StateId(self.state.history, self.state.step + 1), False
        return self.state

    def end(self, reason: str) -> None:
        """This rank's loop ends the run after the present state."""
        assert self.state is not None
        self.ended = LoopEnd(self.state, self.member, reason, own=True)

    def finished(self, digest: str) -> None:
        """The last step is committed: of the run, before a stop, or before the end by a loop. Wait at the barrier."""
        assert self.view is not None and self.state is not None
        ended = self.ended.reason if self.ended is not None and self.ends_here else ""
        self._say(Finished(self.member, self.view.generation, self.state, digest, halted=self.halted, ended=ended))

    @property
    def asked_to_save(self) -> bool:
        """There is a checkpoint to write while this rank waits at the finish barrier."""
        return isinstance(self._status, Finished) and any(request not in self._orders.served for request in self._orders.saves.values())

    def final_request(self) -> int | None:
        """The request of the checkpoint to write at the finish barrier, where all hold one state and no rank moves; None: no request."""
        asked = (request for request in self._orders.saves.values() if request not in self._orders.served)
        request = next(asked, None) if self.asked_to_save and not self.interrupted else None
        self._orders.served.add(request or 0)
        return request

    def left(self) -> None:
        """The train function has returned; wait to be released."""
        finished = self._status
        assert isinstance(finished, Finished)
        self._say(Left(self.member, finished.generation, finished.state, finished.digest))

    def written(self, event: PartWritten) -> None:
        """A part of a checkpoint is written. The rank repeats this at the finish barrier, where the run may wait for it alone."""
        self._orders.part = event
        self.outbox.append(event)

    def ask_once(self, key: str) -> None:
        """Ask whether this rank may do the task ``key`` for all. The answer comes to :attr:`answers`."""
        self.answers.pop(key, None)
        self.outbox.append(OnceWanted(self.member, key))

    def done_once(self, key: str, result: str) -> None:
        """Report the result of the task ``key``. The answer has the result that counts."""
        self.answers.pop(key, None)
        self.outbox.append(OnceDone(self.member, key, result))

    # ---- agreement at step boundaries --------------------------------------------------------------------------------------------------

    def proposal(self) -> View | None:
        """The view to form beside the running steps; None when there is none, or when it has formed."""
        return self._proposal.view if self._proposal is not None and not self._proposal.formed else None

    def holds_proposal(self, generation: int) -> bool:
        """Whether the proposal of ``generation`` still stands, formed or not."""
        return self._proposal is not None and self._proposal.view.generation == generation

    def proposal_formed(self, generation: int) -> None:
        if self._proposal is not None and self._proposal.view.generation == generation:
            self._proposal.formed = True

    @property
    def _offers(self) -> bool:
        return self._proposal is not None and self._proposal.offered

    def offer(self, *, between: bool = False) -> Offer:
        """This rank's part of the agreement, which travels with each step's reduction.

        First the generation of the formed proposal, ``NO_VIEW``, or ``LAST_STEP``. Then, by level, the newest checkpoint request of this
        view, or 0 once it is served. ``between``: the next step belongs to this one, so the rank neither saves its state here nor halts.
        """
        proposal, orders = self._proposal, self._orders
        if proposal is not None:
            proposal.offered = proposal.formed and not orders.halt
        offered = LAST_STEP if orders.halt and not between else NO_VIEW
        if proposal is not None and proposal.offered:
            offered = proposal.view.generation
        requests = [0 if between else orders.saves.get(level.name, 0) for level in LEVELS]
        return offered, *(request if request not in orders.served else 0 for request in requests)

    def agree(self, offers: list[Offer]) -> tuple[View | None, int | None]:
        """All members' offers -> (view to enter after this step or None, checkpoint request to serve after this step or None).

        They may agree to halt there instead, then :attr:`halted` is true.

        Members agree only where all offers are the same. Of two requests, that of the first level comes first, and the other follows at the
        next boundary. Every member sees the same offers and uses no other input, so all decide alike. If a member died in the reduction, a
        new view follows instead.
        """
        generations, *requests = (set(column) for column in zip(*offers, strict=True))
        proposal = self._proposal
        enter = proposal.view if proposal is not None and generations == {proposal.view.generation} else None
        self.withdraw(entered=enter is not None)
        self._orders.halted = generations == {LAST_STEP}
        save = next((request for level in requests if len(level) == 1 for request in level if request), 0)
        self._orders.served.add(save)
        return enter, save or None

    def withdraw(self, *, entered: bool = False) -> None:
        """The offer is over: members have answered it, or the step with this offer did not end."""
        if self._proposal is None:
            return
        self._proposal.offered = False
        if self._proposal.cancelled and not entered:
            self._proposal = None

    def begins(self, view: View) -> bool:
        """A new history begins with the donor of ``view``: from a checkpoint, or from the donor's initial state."""
        return view.checkpoint is not None or self.state is None or self.state.history != view.state.history

    def gives(self, view: View) -> bool:
        """This rank is the donor of its column of ``view``, and members of the column need the state."""
        column = view.column_of(self.member)
        return column.rank_of(self.member) == column.giver

    def settles_detached(self, view: View, *, steady: bool) -> bool:
        """Whether the rank can join the view while its loop computes: it receives no state, and no transfer reads a changing state.

        ``steady``: the tracked state does not change while shards are computed.
        """
        receives = view.rank_of(self.member) in view.receivers or self.sharded
        return not receives and not self.begins(view) and (steady or not self.gives(view))

    def enter(self, view: View) -> None:
        """Join an agreed proposal; ``formed`` follows when the newcomers hold the state."""
        self._join(view)

    def stand_by(self, view: View) -> None:
        """The other members enter ``view``, as all have agreed. This rank stands by."""
        self.floor = max(self.floor, view.generation)
        self.view = self._proposal = None
        self._say_quiesced(Departure.STANDS_BY, "", None)

    # ---- helpers -------------------------------------------------------------------------------------------------------------------------

    @property
    def _testimony(self) -> Finding | None:
        """The rank's last finding of how ranks differ, if it has joined no view since then."""
        return self._status.testimony if isinstance(self._status, Quiesced) else None

    def _say(self, event: Event) -> None:
        self._status = event
        self.outbox.append(event)

    def _say_quiesced(self, why: Departure, detail: str, testimony: Finding | None) -> None:
        if self.incarnation is not None:
            engaged = Engaged.ALONE if self.alone else Engaged.COMPUTES if self.detached else Engaged.WAITS
            self._say(Quiesced(self.member, self.floor, self.state, self.dirty, why, detail, testimony, engaged))
