"""A rank's seat in a view: forming the process group, taking or giving state, and changing seats at a step boundary."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from actors.rank.client import Client
from actors.rank.custody import Custody
from actors.rank.engine import Engine
from actors.rank.process_group import Forming, Group, GroupBroken
from actors.rank.recorder import Recorder
from actors.rank.saving import PartsPort
from actors.rank.state import TrackedState, receive_state, send_state
from fleet.config import Timeouts
from fleet.errors import FleetError
from fleet.levels import STORE, level_at
from fleet.member import Offer
from fleet.records import REFORM, RESTORE, STANDBY
from fleet.types import Finding, StateId, View
from fleet.urgency import be_ordinary, be_prompt, be_steady


class Sitting:
    """A view that this rank is joining. ``beside``: a thread sees to it while the loop computes; ``done`` once that ended.

    ``promised``: the others know what this rank brings.
    """

    def __init__(self, view: View, forming: Forming, beside: bool) -> None:
        self.view, self.forming, self.beside = view, forming, beside
        self.promised = False
        self.done = threading.Event()
        self.error = ""


class Arriving(NamedTuple):
    """The state that is on its way to this rank. ``alike``: its donor trains the same parameters."""

    state: StateId
    alike: bool


class Transfer:
    """The state on its way, at either end in a thread of its own: it changes only once the step that newcomers take part in is reduced."""

    def __init__(self, carry: Callable[[], None], name: str) -> None:
        pool = ThreadPoolExecutor(1, name, functools.partial(be_prompt, children=True))  # a rank may wait for it before long
        self._carried = pool.submit(carry)
        pool.shutdown(wait=False)

    def join(self) -> None:
        """Until it is there. Raises GroupBroken, and what is wrong with the state itself."""
        self._carried.result()

    def end(self) -> None:
        """Until nothing is under way, however it ended."""
        wait([self._carried])


class Seat:
    """Owns the process group. ``take`` blocks until the rank is in a view, or the run is over for it.

    Between the attempts at a step the loop computes and does not need its group. The rank is *aside* then: the listening thread answers
    when it is called out of its view, and takes the seat in the next one, so that all of this costs no time while there is work to do.
    The loop comes in person (``claim``) when it wants to reduce, and early (``wanted``) when its state has to be changed.

    It is made by the loop's thread, which runs for long at a time once it is :meth:`settled`.

    Args:
        host: the address at which peers reach this rank.
        timeouts: bounds of any wait inside a group; the coordinator interrupts earlier when something is known to be wrong.
    """

    def __init__(self, client: Client, recorder: Recorder, parts: PartsPort, host: str, timeouts: Timeouts) -> None:
        self._client, self._recorder, self._parts, self._host, self._timeouts = client, recorder, parts, host, timeouts
        self._protocol = client.protocol
        self._sitting: Sitting | None = None
        self._next: tuple[View, Forming] | None = None
        self._fresh = True
        self._stale: list[Sitting | Group] = []
        self._transfer: Transfer | None = None
        self.arriving: Arriving | None = None
        self.ahead = False
        self.group: Group | None = None
        self._state: TrackedState | None = None
        self._engine: Engine | None = None
        self._foresee: Callable[[View], bool] = lambda view: False
        self._custody: Custody | None = None
        self._loop, self._steadily = threading.get_native_id(), False
        client.on_interrupt = self._interrupt
        client.on_message = self._look_ahead

    def serve(self, state: TrackedState, engine: Engine, foresee: Callable[[View], bool], custody: Custody | None = None) -> None:
        """What is given to newcomers, and taken from donors; ``custody`` of what is spread over all.

        ``foresee``: whether there is something to compute of the step at hand while the group of a view forms. It is called under the lock.
        """
        self._state, self._engine, self._foresee, self._custody = state, engine, foresee, custody
        self._protocol.sharded = custody is not None

    @property
    def view(self) -> View:
        view = self._protocol.view
        assert view is not None
        return view

    @property
    def rank(self) -> int:
        return self.view.rank_of(self._protocol.member)

    @property
    def over(self) -> bool:
        """The run is over for this rank."""
        return self._protocol.released is not None

    @property
    def wanted(self) -> bool:
        """The loop should come, with what it has computed: nobody can answer for it."""
        sitting = self._sitting
        return self._protocol.interrupted or (sitting is not None and not sitting.beside)

    def step_aside(self) -> None:
        """The loop goes on without need of its group."""
        with self._client.lock:
            self._protocol.step_aside()
            self._look_ahead()
        self._client.say()

    def claim(self) -> bool:
        """The loop is here in person. False when it has to :meth:`take` a seat first."""
        with self._client.lock:
            self._protocol.aside = False
            return self._protocol.view is not None and not self._protocol.interrupted and self._sitting is None and self.group is not None

    def take(self) -> bool:
        """Wait to be called into a view and join it. False when the run is over for this rank.

        When something to compute meanwhile is foreseen, it is joined beside that: the loop is :attr:`ahead`, and comes back.
        """
        assert self._engine is not None
        self.ahead = False
        self._recorder.switch(STANDBY if self._fresh else REFORM)
        with self._client.lock:
            self._protocol.aside = False
        while True:
            if self._protocol.interrupted and self._protocol.view is not None:
                self.leave("told to leave")
            self._clear()
            self._client.wait(lambda: self._protocol.released or self._protocol.called or self._sitting)
            with self._client.lock:
                if self._protocol.released:
                    return False
                sitting = self._sitting = self._sitting or self._called()
                self.ahead = sitting is not None and sitting.beside and not sitting.promised and self._foresee(sitting.view)
            if self.ahead:
                self.step_aside()
                return True
            if sitting is None:
                continue
            try:
                self._join(sitting)
                return True
            except GroupBroken as error:
                self.leave(str(error))

    def leave(self, reason: str, testimony: Finding | None = None) -> None:
        """Give up the group, and tell the coordinator where this rank stands, and how it differs from the others."""
        with self._client.lock:
            self._drop_seat()
            self._drop_next()
            self._protocol.broken(reason, testimony)
        self._client.say()  # before anything that takes time: the next view waits for it
        self._recorder.switch(REFORM)
        self._clear()

    def settled(self) -> None:
        """A step was committed in this view: everyone computes now."""
        with self._client.lock:
            if not self._steadily and self.group is not None:
                self._steadily = True
                be_steady(self._loop)

    def _hurry(self) -> None:
        """The view changes: everyone waits for what the loop does next. From any thread, under the lock."""
        if self._steadily:
            self._steadily = False
            be_ordinary(self._loop)

    def hold_still(self) -> None:
        """Before the state changes or is used: it is where it was on its way to. Raises GroupBroken."""
        if self._transfer is not None:
            self._transfer.join()
            self._transfer = self.arriving = None

    def enter(self, view: View) -> None:
        """At the agreed step boundary: change into the proposal that was formed beside the running steps."""
        with self._client.lock:
            self._protocol.enter(view)
            ahead, self._next = self._next, None
            if ahead is None:
                raise GroupBroken("told to leave before the agreed view was entered", view.generation)
            self._drop_seat()
            sitting = self._sitting = Sitting(view, ahead[1], False)
        self._recorder.switch(REFORM)
        self._clear()
        self._join(sitting)

    def offer(self) -> Offer:
        """What this rank says at the next step boundary; see ``MemberProtocol.offer``."""
        with self._client.lock:
            if self._next is not None and self._next[1].done:
                self._protocol.proposal_formed(self._next[0].generation)
            return self._protocol.offer()

    # ---- joining -----------------------------------------------------------------------------------------------

    def _called(self) -> Sitting | None:
        """A view to join now, if there is one."""
        if (view := self._protocol.next_view()) is not None:
            self._recorder.switch(REFORM)
            if self._settles_aside(view) and self._foresee(view):
                return self._sit_beside(view)
        elif (view := self._protocol.proposal()) is not None:  # the newcomer stands by, beside the running steps, until the members come
            self._protocol.enter(view)
        return None if view is None else Sitting(view, self._form(view), False)

    def _join(self, sitting: Sitting) -> None:
        """The loop takes the seat, unless the listening thread has all but done so."""
        if sitting.beside:
            sitting.done.wait()
            if sitting.error:
                raise GroupBroken(sitting.error, sitting.view.generation)
        self._check(sitting)
        group = sitting.forming.wait()
        with self._client.lock:
            self._check(sitting)
            self.group, self._sitting = group, None
        if not sitting.beside:
            self._exchange(sitting.view, group)
        self._fresh = False

    def _formed(self, state: StateId) -> None:
        with self._client.lock:
            self._protocol.formed(state)
        self._client.say()

    def _form(self, view: View) -> Forming:
        assert self._engine is not None, "called into a view before serve()"
        return Forming(
            store=view.store,
            generation=view.generation,
            rank=view.rank_of(self._protocol.member),
            size=len(view.members),
            device=self._engine.device,
            timeout_s=self._timeouts.progress_s,
            operation_s=self._timeouts.collective_s,
            host=self._host,
        )

    def _check_seated(self, view: View) -> None:
        if self._protocol.view is not view:
            raise GroupBroken("left meanwhile", view.generation)

    def _check(self, sitting: Sitting) -> None:
        """The interrupt may have come before there was anything to interrupt."""
        if self._protocol.interrupted or self._protocol.view is not sitting.view:
            raise GroupBroken("told to leave", sitting.view.generation)

    def _exchange(self, view: View, group: Group) -> None:
        """The donor gives its state to the receivers; everyone else goes on. Each says that it is there once it holds the state."""
        mine = self._protocol.state
        me, donor = view.rank_of(self._protocol.member), view.donor
        if me == donor and self._protocol.begins(view):
            mine = self._begin(view)
        if self._custody is not None:
            self._recorder.switch(RESTORE)
            self._formed(self._custody.exchange(group, view))
        elif me in view.receivers:
            self._recorder.switch(RESTORE)
            self._receive(view, group, donor)
        else:
            mine = mine or view.state
            if self._protocol.gives(view):
                self._give(view, group, mine)
                if not self._steady:
                    self._recorder.switch(RESTORE)
                    self.hold_still()
            self._formed(mine)

    @property
    def _steady(self) -> bool:
        assert self._engine is not None
        return self._engine.steady

    def _give(self, view: View, group: Group, mine: StateId) -> None:
        """Begin to give the state to those who need it; ``hold_still`` waits until they have it."""
        state, engine = self._state, self._engine
        assert state is not None and engine is not None

        def give() -> None:
            for receiver in view.receivers:
                group.send(torch.tensor([mine.lineage, mine.step, engine.trained]), receiver)
            for receiver in view.receivers:
                send_state(group, receiver, state)

        self._transfer = Transfer(give, "fleet-give")

    def _receive(self, view: View, group: Group, donor: int) -> None:
        """Learn which state it will be, and begin to receive it; ``hold_still`` waits until it is here."""
        state, engine = self._state, self._engine
        assert state is not None and engine is not None
        engine.reset()
        numbers = torch.empty(3, dtype=torch.int64)
        group.recv(numbers, donor)
        lineage, step, trained = numbers.tolist()

        def dirty() -> None:
            with self._client.lock:  # whoever has left has said what it holds
                self._check_seated(view)
                self._protocol.receiving()

        def take() -> None:
            receive_state(group, donor, state, dirty)
            with self._client.lock:
                self._check_seated(view)
                self._protocol.formed(StateId(lineage, step))
            self._client.say()

        self.arriving = Arriving(StateId(lineage, step), trained == engine.trained)
        self._transfer = Transfer(take, "fleet-take")

    def _begin(self, view: View) -> StateId:
        """No rank held a clean state: the donor starts from the checkpoint, or from the state that the train function built."""
        assert self._state is not None and self._engine is not None
        self._engine.reset()
        if view.checkpoint is not None:
            self._recorder.switch(RESTORE)
            skeleton, tensors = self._load(view, view.checkpoint)
            self._protocol.receiving()
            self._state.load(skeleton, tensors)
        elif not self._fresh:
            raise FleetError("there is no checkpoint to go back to, and this rank's initial state is gone: a fresh process has to begin")
        self._engine.begin(view.state)
        return view.state

    def _load(self, view: View, checkpoint: str) -> tuple[str, list[torch.Tensor]]:
        """A memory may go while it is read: the coordinator will say from what to begin instead. A store that fails ends this rank."""
        try:
            return self._parts.load(checkpoint)
        except OSError as error:
            if level_at(checkpoint) == STORE:
                raise
            raise GroupBroken(f"the copies of {view.state} cannot be read: {error}", view.generation) from error

    # ---- from the listening thread -----------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Start forming at once, beside the running steps: a proposal, or the next view of a rank that is aside."""
        with self._client.lock:
            self._sweep()
            if self._next is not None and not self._protocol.holds_proposal(self._next[0].generation):
                self._drop_next()
            if self._protocol.aside and self._protocol.view is None and (view := self._protocol.next_view()) is not None:
                self._sit_beside(view)
            proposal = self._protocol.proposal()
            seated = self._protocol.view is not None and not self._protocol.forming
            if seated and proposal is not None and self._next is None:
                self._next = (proposal, self._form(proposal))

    def _settles_aside(self, view: View) -> bool:
        """The loop is needed in person only where its state has to change, or to hold still."""
        return self._protocol.settles_aside(view, steady=self._steady)

    def _sit_beside(self, view: View) -> Sitting:
        sitting = self._sitting = Sitting(view, self._form(view), self._settles_aside(view))
        if sitting.beside:
            self._foresee(view)
            threading.Thread(target=self._settle_beside, args=(sitting,), name=f"fleet-settle-{view.generation}").start()
        return sitting

    def _settle_beside(self, sitting: Sitting) -> None:
        try:
            group, mine = sitting.forming.wait(), self._protocol.state
            assert mine is not None and self._engine is not None
            with self._client.lock:
                self._check(sitting)  # of two views only the later one's promise counts
                self._engine.promise(group)
                sitting.promised = True
            if self._protocol.gives(sitting.view):
                self._give(sitting.view, group, mine)
            with self._client.lock:
                self._check(sitting)
                self._protocol.formed(mine)
        except GroupBroken as error:
            sitting.error = str(error)
            with self._client.lock:
                if self._sitting is sitting and self._protocol.aside:
                    self._drop_seat()
                    self._protocol.broken(str(error))
        finally:
            sitting.done.set()
        self._client.say()

    def _interrupt(self) -> None:
        with self._client.lock:
            self._hurry()
            if self._protocol.interrupted:  # the loop is in there: wake it, it will leave
                for part in (self._sitting.forming if self._sitting else None, self.group):
                    if part is not None:
                        part.interrupt("told to leave by the coordinator")
            self._sweep()

    def _sweep(self) -> None:
        """Give up what does not belong to the rank's view: it was called out while it was aside."""
        view = self._protocol.view
        generations = {self.group.generation if self.group else None, self._sitting.view.generation if self._sitting else None} - {None}
        if any(view is None or generation != view.generation for generation in generations):
            self._drop_seat()

    def _drop_seat(self) -> None:
        """Nothing of the present seat is used any more. The loop frees its memory later: see ``_clear``."""
        self._hurry()
        for part in (self._sitting, self.group):
            if part is not None:
                (part.forming if isinstance(part, Sitting) else part).interrupt("left")
                self._stale.append(part)
        self._sitting = self.group = None

    def _clear(self) -> None:
        with self._client.lock:
            stale, self._stale = self._stale, []
        if stale and self._transfer is not None:
            self._transfer.end()  # its group was interrupted
            self._transfer = self.arriving = None
        for part in stale:
            if isinstance(part, Group):
                part.close()
            elif part.beside:
                part.done.wait()

    def _drop_next(self) -> None:
        if self._next is not None:
            ahead, self._next = self._next[1], None
            ahead.interrupt("the proposal was dropped")
