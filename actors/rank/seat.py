"""A rank's seat in a view: forming the process group, taking or giving state, and changing seats at a step boundary."""

from __future__ import annotations

from typing import Protocol

import torch

from actors.rank.client import Client
from actors.rank.process_group import Forming, Group, GroupBroken
from actors.rank.recorder import Recorder
from actors.rank.state import TrackedState, receive_state, send_state
from fleet.config import Timeouts
from fleet.errors import FleetError
from fleet.records import COMPUTE, REFORM, RESTORE, STANDBY
from fleet.types import Part, StateId, View


class PartsPort(Protocol):
    """Durable checkpoints as a rank sees them; ``storage`` implements it."""

    def write(self, state: StateId, generation: int, index: int, count: int, tensors: list[tuple[int, torch.Tensor]]) -> tuple[str, Part]:
        """(id of the checkpoint, the part as written); durable when this returns."""
        ...

    def load(self, checkpoint: str) -> tuple[str, list[torch.Tensor]]:
        """(skeleton, tensors) of a committed checkpoint, verified."""
        ...


class Seat:
    """Owns the process group. ``take`` blocks until the rank is in a view, or the run is over for it.

    Args:
        host: the address at which peers reach this rank.
        timeouts: bounds of any wait inside a group; the coordinator interrupts earlier when something is known to be wrong.
    """

    def __init__(self, client: Client, recorder: Recorder, parts: PartsPort, host: str, timeouts: Timeouts) -> None:
        self._client, self._recorder, self._parts, self._host, self._timeouts = client, recorder, parts, host, timeouts
        self._protocol = client.protocol
        self._forming: Forming | None = None
        self._next: tuple[View, Forming] | None = None
        self._fresh = True
        self.group: Group | None = None
        self.state: TrackedState | None = None
        self.device = torch.device("cpu")
        client.on_interrupt = self._interrupt
        client.on_message = self._look_ahead

    @property
    def view(self) -> View:
        view = self._protocol.view
        assert view is not None
        return view

    @property
    def rank(self) -> int:
        return self.view.rank_of(self._protocol.member)

    def take(self, state: TrackedState, device: torch.device) -> bool:
        """Wait to be called into a view and join it. False when the run is over for this rank."""
        self.state, self.device = state, device
        self._recorder.switch(STANDBY if self._fresh else REFORM)
        while True:
            self._client.wait(lambda: self._protocol.released or self._protocol.called)
            with self._client.lock:
                if self._protocol.released:
                    return False
                view, newcomer = self._protocol.next_view(), False
                if view is None:
                    view, newcomer = self._protocol.proposal(), True
                    if view is None:
                        continue
                    self._protocol.enter(view)
            try:
                self._join(view, newcomer)
                return True
            except GroupBroken as error:
                self.leave(str(error))

    def leave(self, reason: str) -> None:
        """Give up the group, and tell the coordinator where this rank stands."""
        self._discard(self._forming, self.group)
        self._forming = self.group = None
        self._drop_next()
        self._recorder.switch(REFORM)
        with self._client.lock:
            self._protocol.broken(reason)
        self._client.say()

    def enter(self, view: View) -> None:
        """At the agreed step boundary: change into the proposal that was formed beside the running steps."""
        with self._client.lock:
            self._protocol.enter(view)
            ahead, self._next = self._next, None
        if ahead is None:
            raise GroupBroken("told to leave before the agreed view was entered", view.generation)
        old, self.group = self.group, None
        self._recorder.switch(REFORM)
        self._discard(old)
        self._forming = ahead[1]
        self._settle(view, self._forming.wait())

    def offer(self) -> tuple[int, int]:
        """What this rank says at the next step boundary; see ``MemberProtocol.offer``."""
        with self._client.lock:
            if self._next is not None and self._next[1].done:
                self._protocol.proposal_formed(self._next[0].generation)
            return self._protocol.offer()

    # ---- joining -----------------------------------------------------------------------------------------------

    def _join(self, view: View, newcomer: bool) -> None:
        if not newcomer:  # a newcomer stands by, beside the running steps, until the members come over
            self._recorder.switch(REFORM)
        self._forming = self._form(view)
        self._check()
        self._settle(view, self._forming.wait())

    def _settle(self, view: View, group: Group) -> None:
        self.group, self._forming = group, None
        self._check()
        state = self._exchange(view, group)
        with self._client.lock:
            self._protocol.formed(state)
        self._fresh = False
        self._client.say()
        self._recorder.switch(COMPUTE)
        self._recorder.place(view.generation, state.lineage, state.step)

    def _form(self, view: View) -> Forming:
        return Forming(
            store=view.store,
            generation=view.generation,
            rank=view.rank_of(self._protocol.member),
            size=len(view.members),
            device=self.device,
            timeout_s=self._timeouts.progress_s,
            operation_s=self._timeouts.collective_s,
            host=self._host,
        )

    def _check(self) -> None:
        """The interrupt may have come before there was anything to interrupt."""
        if self._protocol.interrupted:
            raise GroupBroken("told to leave", self.view.generation)

    def _exchange(self, view: View, group: Group) -> StateId:
        """The donor gives its state to the receivers; everyone else goes on. Returns the state that all hold now."""
        assert self.state is not None
        mine = self._protocol.state
        me, donor = view.rank_of(self._protocol.member), view.donor
        if me == donor and (view.checkpoint is not None or mine is None or mine.lineage != view.state.lineage):
            mine = self._begin(view)
        if me in view.receivers:
            self._recorder.switch(RESTORE)
            return self._receive(group, donor)
        if me == donor and view.receivers:
            self._recorder.switch(RESTORE)
            for receiver in view.receivers:
                group.send(_numbers(mine or view.state), receiver)
                send_state(group, receiver, self.state)
        return mine or view.state

    def _receive(self, group: Group, donor: int) -> StateId:
        assert self.state is not None
        numbers = _numbers(StateId(0, 0))
        group.recv(numbers, donor)
        receive_state(group, donor, self.state, self._protocol.receiving)
        return StateId(*numbers.tolist())

    def _begin(self, view: View) -> StateId:
        """No rank held a clean state: the donor starts from the checkpoint, or from the state that the train function built."""
        assert self.state is not None
        if view.checkpoint is not None:
            self._recorder.switch(RESTORE)
            self._protocol.receiving()
            self.state.load(*self._parts.load(view.checkpoint))
        elif not self._fresh:
            raise FleetError("there is no checkpoint to go back to, and this rank's initial state is gone: a fresh process has to begin")
        return view.state

    # ---- from the listening thread -----------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Start forming a proposal at once, beside the running steps."""
        with self._client.lock:
            if self._next is not None and not self._protocol.holds_proposal(self._next[0].generation):
                self._drop_next()
            proposal = self._protocol.proposal()
            seated = self._protocol.view is not None and not self._protocol.forming
            if seated and proposal is not None and self._next is None:
                self._next = (proposal, self._form(proposal))

    def _interrupt(self) -> None:
        with self._client.lock:
            for part in (self._forming, self.group):
                if part is not None and self._protocol.interrupted:
                    part.interrupt("told to leave by the coordinator")

    def _drop_next(self) -> None:
        if self._next is not None:
            ahead, self._next = self._next[1], None
            ahead.interrupt("the proposal was dropped")

    @staticmethod
    def _discard(*parts: Forming | Group | None) -> None:
        for part in parts:
            if isinstance(part, Group):
                part.interrupt("left")
                part.close()
            elif part is not None:
                part.interrupt("left")


def _numbers(state: StateId) -> torch.Tensor:
    return torch.tensor([state.lineage, state.step], dtype=torch.int64)
