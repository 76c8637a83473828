"""The rank's half of the membership protocol: pure, so that the simulator runs the very object that a live rank runs.

A rank is told things (``receive``), asks what to do next (``parking``, ``next_view``, ``agree`` ...), and reports what happened to it; what
it must say to the coordinator collects in ``outbox``. Nothing here blocks, reads a clock or knows torch.
"""

from __future__ import annotations

from dataclasses import replace

from fleet.protocol.causes import Departure, Engaged
from fleet.protocol.events import Event, Finished, Formed, Joined, Left, OnceDone, OnceWanted, PartFailed, PartWritten, Quiesced, Ready
from fleet.protocol.instructions import (
    Cancel,
    Conclude,
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
from fleet.protocol.types import Finding, Member, Process, StateId, View

NOTHING, INTERRUPT = "", "interrupt"

Offer = tuple[int, ...]
"""What a rank says at a step boundary; see :meth:`MemberProtocol.offer`."""
NO_VIEW, LAST_STEP = -1, -2
"""What it says in place of a proposal's generation: it has none that is formed; it was told to halt."""


class MemberProtocol:
    """One rank process's side of the protocol.

    Args:
        slot: the slot that this process fills.
        token: drawn once by the process; makes a doubled hello harmless.
        process: how its node's agent can signal it.
        store: address of the key-value store that it offers for rendezvous.

    Attributes:
        alone: the loop evaluates, or does what is done once in the run.
        sharded: a part of the state is spread over the ranks, so that it moves whenever the view changes.
        halted: all members of the view have agreed that the step they have just taken is the last, as the run is to stop.
        concluded: the last step is committed by all and kept: the code behind the loop may run.
        answers: what the coordinator has said of what is done once, by key; see ``fleet.protocol.once``.
    """

    def __init__(self, slot: int, token: str, process: Process, store: str) -> None:
        self.slot, self.token, self.process, self.store = slot, token, process, store
        self.incarnation: int | None = None
        self.outbox: list[Event] = []
        self.state: StateId | None = None
        self.dirty = False
        self.view: View | None = None
        self.released: str | None = None
        self.fenced: str | None = None
        self.floor = -1
        self.forming = False
        self.detached = self.alone = False
        self.sharded = False
        self.halted = False
        self.concluded = False
        self.answers: dict[str, OnceAnswer] = {}
        self._testimony: Finding | None = None
        self._incomplete = False
        self._in_person = False
        self._status: Event | None = None
        self._part: PartWritten | None = None
        self._pending: View | None = None
        self._proposal: View | None = None
        self._proposal_formed = False
        self._offered = False
        self._cancelled = False
        self._halt_ordered = False
        self._save_requests: dict[str, int] = {}
        self._saved: set[int] = set()
        self._to_keep: Keep | None = None

    @property
    def member(self) -> Member:
        if self.incarnation is None:
            raise RuntimeError(f"slot {self.slot} was not yet welcomed by the coordinator")
        return Member(self.slot, self.incarnation)

    @property
    def generation(self) -> int:
        """Generation that this rank has joined, or the greatest that it left."""
        return self.view.generation if self.view else self.floor

    @property
    def interrupted(self) -> bool:
        """The rank must stop what it does in its process group: it was told to leave, or the run is over for it."""
        return self.released is not None or self.fenced is not None or (self.view is not None and self.view.generation <= self.floor)

    @property
    def waits(self) -> bool:
        """The rank can do nothing until the coordinator speaks; it repeats its status meanwhile."""
        if isinstance(self._status, Finished):
            return not self.concluded
        return self.incarnation is None or self.view is None or isinstance(self._status, Left)

    @property
    def called(self) -> bool:
        """There is a view to form now: a published one, or a proposal while the rank is in none."""
        return self._pending is not None or (self.view is None and self.proposal() is not None)

    # ---- what the coordinator says ---------------------------------------------------------------------------------------------------

    def hello(self) -> Joined:
        """First words on every new connection; the last status is repeated after it."""
        return Joined(self.slot, self.token, self.process, self.store, self.incarnation)

    def status(self) -> list[Event]:
        """What the coordinator should know of this rank; repeated while it waits, since messages may be lost."""
        known = [event for event in (self._status, self._part if isinstance(self._status, Finished) else None) if event is not None]
        return [self.hello(), *(known if self.incarnation is not None else [])]

    def receive(self, message: Instruction) -> str:
        """Take one instruction. Returns ``INTERRUPT`` when the process group must be woken from outside, else ``NOTHING``."""
        match message:
            case Welcome(token=token, incarnation=incarnation) if token == self.token:
                self.incarnation = incarnation
            case Quiesce(members=members, generation=generation, in_person=in_person) if self._me_in(members):
                return self._on_quiesce(generation, in_person)
            case Publish(view=view):
                self._on_publish(view)
            case Propose(view=view) if self._fits(view):
                self._on_propose(view)
            case Cancel(members=members, generation=generation) if self._me_in(members):
                self._on_cancel(generation)
            case SaveCheckpoint(members=members, generation=generation, request=request) if self._me_in(members):
                if generation == self.generation:
                    level = level_of(request)
                    self._save_requests[level] = max(self._save_requests.get(level, 0), request)
            case Halt(members=members, generation=generation) if self._me_in(members):
                self._halt_ordered = self._halt_ordered or generation == self.generation
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
            return NOTHING  # behind the loop there is no view to leave; an agent that is cut off does not know
        self.floor = max(self.floor, generation)
        self._in_person = in_person
        if self._pending and self._pending.generation <= self.floor:
            self._pending = None
        if self._proposal and self._proposal.generation <= self.floor:
            self._drop_proposal()
        if self.view is None:
            self._say_quiesced(Departure.IDLE)
            return NOTHING
        if self.view.generation > self.floor:
            return NOTHING
        self._leave_detached()
        return INTERRUPT

    def detach(self) -> None:
        """The loop computes on what it holds and does not need its group: whoever listens may answer for it until it ends ``detached``."""
        self.detached = True
        if self.view is not None and self.view.generation <= self.floor:
            self._leave_detached()

    def _leave_detached(self) -> None:
        """Called out of the view while the loop does without it. In person it has to come when it may be the loop that hangs."""
        if self.detached and not self._in_person:
            self.broken("told to leave")

    def _on_keep(self, order: Keep) -> None:
        """Said again until it is answered. In no view nothing changes the state, so that it can be read beside the loop."""
        if self._part is not None and self._part.request == order.request:
            self.outbox.append(self._part)
        elif order.request not in self._saved:
            self._saved.add(order.request)
            if self.view is None and not self.dirty and self.state == order.state:
                self._to_keep = order
            else:
                self.outbox.append(PartFailed(self.member, order.request, f"it holds {self.state}{', half changed' if self.dirty else ''}"))

    def to_keep(self) -> Keep | None:
        """What to write beside the loop now; it is given once."""
        order, self._to_keep = self._to_keep, None
        return order

    def _on_conclude(self, generation: int) -> None:
        if isinstance(self._status, Finished) and generation == self.generation and not self.interrupted:
            self.concluded, self._status = True, replace(self._status, concluded=True)

    def _on_propose(self, view: View) -> None:
        if view.generation == self.generation:
            self._repeat()  # entered already, and nobody seems to know
        elif view.generation > self.generation and not self._offered and not self.holds_proposal(view.generation):
            self._drop_proposal()
            self._proposal = view

    def _repeat(self) -> None:
        if self._status is not None:
            self.outbox.append(self._status)

    def _on_publish(self, view: View) -> None:
        if self.view is not None and view.generation == self.view.generation:
            self._repeat()
        elif self._fits(view) and view.generation > self.generation:
            self._pending = view

    def _on_cancel(self, generation: int) -> None:
        if self._proposal is None or self._proposal.generation != generation:
            return
        if self._offered:
            probe("a proposal is cancelled while it is offered")
            self._cancelled = True  # the other members may have counted on this offer already: the step's outcome decides
        else:
            self._drop_proposal()

    # ---- what happens to the rank ----------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """The model is built; the rank can be put in a view."""
        self._say(Ready(self.member))

    def next_view(self) -> View | None:
        """The published view to form now; ``formed`` or ``broken`` must follow."""
        view, self._pending = self._pending, None
        if view is not None:
            self._join(view)
        return view

    def _join(self, view: View) -> None:
        self.view, self.forming, self._status, self._testimony = view, True, None, None
        self._save_requests, self._saved, self._part = {}, set(), None
        self._halt_ordered = self.halted = self._incomplete = False
        if self._proposal and self._proposal.generation <= view.generation:
            self._drop_proposal()

    def receiving(self) -> None:
        """State is about to be overwritten."""
        self.dirty = True

    def incomplete(self) -> None:
        """No member of the view holds some of a sharded state. What this rank holds stays: whoever is missed may only be late."""
        self._incomplete = True

    def begun(self, state: StateId) -> None:
        """A new history begins here: the rank holds ``state``, whole. Should its group break before others have theirs, it still does."""
        self.state, self.dirty = state, False

    def formed(self, state: StateId) -> None:
        """The process group works and the rank holds ``state``."""
        assert self.view is not None
        self.state, self.dirty, self.forming = state, False, False
        self._say(Formed(self.member, self.view.generation, state))

    def broken(self, reason: str, testimony: Finding | None = None) -> None:
        """The rank has left its process group: a peer was lost, it was to quiesce, or it has seen that ranks differ (``testimony``)."""
        called = self.view is not None and self.view.generation <= self.floor
        if self.view is not None:
            self.floor = max(self.floor, self.view.generation)
            self._testimony = testimony
        self.view, self.forming = None, False
        self._drop_proposal()
        why = Departure.CALLED if called else Departure.BROKEN
        if self._incomplete:
            why, self._incomplete = Departure.INCOMPLETE, False
        self._say_quiesced(Departure.DIFFERS if testimony is not None else why, reason)

    def mutating(self) -> None:
        """The optimizer is about to touch the state."""
        self.dirty = True

    def committed(self) -> StateId:
        """The state is one step further, and clean."""
        assert self.state is not None
        self.state, self.dirty = StateId(self.state.history, self.state.step + 1), False
        return self.state

    def finished(self, digest: str) -> None:
        """The last step is committed, of the run or before a stop; wait at the barrier."""
        assert self.view is not None and self.state is not None
        self._say(Finished(self.member, self.view.generation, self.state, digest, halted=self.halted))

    @property
    def asked_to_save(self) -> bool:
        """There is a checkpoint to write while this rank waits at the finish barrier."""
        return isinstance(self._status, Finished) and any(request not in self._saved for request in self._save_requests.values())

    def final_request(self) -> int | None:
        """The checkpoint to write at the finish barrier, where all hold the same and nobody moves; None when there is none."""
        asked = (request for request in self._save_requests.values() if request not in self._saved)
        request = next(asked, None) if self.asked_to_save and not self.interrupted else None
        self._saved.add(request or 0)
        return request

    def left(self) -> None:
        """The train function has returned; wait to be released."""
        finished = self._status
        assert isinstance(finished, Finished)
        self._say(Left(self.member, finished.generation, finished.state, finished.digest))

    def written(self, event: PartWritten) -> None:
        """A part of a checkpoint is written. Repeated at the finish barrier, where the run waits for nothing else."""
        self._part = event
        self.outbox.append(event)

    def ask_once(self, key: str) -> None:
        """May this rank do what is done once? The answer comes to :attr:`answers`."""
        self.answers.pop(key, None)
        self.outbox.append(OnceWanted(self.member, key))

    def done_once(self, key: str, result: str) -> None:
        """It is done; the answer says what counts."""
        self.answers.pop(key, None)
        self.outbox.append(OnceDone(self.member, key, result))

    # ---- agreement at step boundaries --------------------------------------------------------------------------------------------------

    def proposal(self) -> View | None:
        """A view to form beside the running steps, if any is wanted and not yet formed."""
        return None if self._proposal_formed else self._proposal

    def holds_proposal(self, generation: int) -> bool:
        """Whether the proposal of ``generation`` still stands, formed or not."""
        return self._proposal is not None and self._proposal.generation == generation

    def proposal_formed(self, generation: int) -> None:
        if self._proposal is not None and self._proposal.generation == generation:
            self._proposal_formed = True

    def offer(self) -> Offer:
        """This rank's part of the agreement that travels with each step's reduction.

        (the proposal that it has formed, ``NO_VIEW``, or ``LAST_STEP``; of each level the newest checkpoint request of this view, or 0 once
        it is served).
        """
        self._offered = self._proposal is not None and self._proposal_formed and not self._halt_ordered
        offered = self._proposal.generation if self._offered and self._proposal else LAST_STEP if self._halt_ordered else NO_VIEW
        requests = [self._save_requests.get(level.name, 0) for level in LEVELS]
        return offered, *(request if request not in self._saved else 0 for request in requests)

    def agree(self, offers: list[Offer]) -> tuple[View | None, int | None]:
        """All members' offers -> (view to enter after this step or None, checkpoint request to serve after this step or None).

        They may agree to halt there instead, then :attr:`halted` is true.

        Done only when all offer the same; of two requests that of the first level comes first, and the other at the next boundary.
        Every member sees the same offers and looks at nothing else, so all decide alike; a member that
        died in the reduction leads to a new view instead.
        """
        generations, *requests = (set(column) for column in zip(*offers, strict=True))
        proposal = self._proposal
        enter = proposal if proposal is not None and generations == {proposal.generation} else None
        self.withdraw(entered=enter is not None)
        self.halted = generations == {LAST_STEP}
        save = next((request for level in requests if len(level) == 1 for request in level if request), 0)
        self._saved.add(save)
        return enter, save or None

    def withdraw(self, *, entered: bool = False) -> None:
        """The offer has had its answer, or the step whose reduction carried it did not come to an end."""
        self._offered = False
        if self._cancelled and not entered:
            self._drop_proposal()

    def begins(self, view: View) -> bool:
        """A new history begins with the donor of ``view``: it starts from a checkpoint, or from the state that it was built with."""
        return view.checkpoint is not None or self.state is None or self.state.history != view.state.history

    def gives(self, view: View) -> bool:
        """This rank is the donor of ``view``, and some of its members need the state."""
        return view.rank_of(self.member) == view.donor and bool(view.receivers)

    def settles_detached(self, view: View, *, steady: bool) -> bool:
        """Whether the view can be joined while the loop computes: its state does not change, or change under a transfer.

        ``steady``: what is tracked stays as it is while shards are computed.
        """
        receives = view.rank_of(self.member) in view.receivers or self.sharded
        return not receives and not self.begins(view) and (steady or not self.gives(view))

    def enter(self, view: View) -> None:
        """Join an agreed proposal; ``formed`` follows when the newcomers hold the state."""
        self._join(view)

    # ---- helpers -------------------------------------------------------------------------------------------------------------------------

    def _drop_proposal(self) -> None:
        self._proposal, self._proposal_formed, self._offered, self._cancelled = None, False, False, False

    def _say(self, event: Event) -> None:
        self._status = event
        self.outbox.append(event)

    def _say_quiesced(self, why: Departure, detail: str = "") -> None:
        if self.incarnation is not None:
            engaged = Engaged.ALONE if self.alone else Engaged.COMPUTES if self.detached else Engaged.WAITS
            self._say(Quiesced(self.member, self.floor, self.state, self.dirty, why, detail, self._testimony, engaged))
