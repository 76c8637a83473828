"""A rank's membership in a view: it forms process groups, receives and sends state, and carries out the rank machine's orders."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from actors.rank.membership.client import Client
from actors.rank.membership.process_group import Forming, Group, GroupBroken
from actors.rank.membership.subgroup import Subgroup
from actors.rank.membership.view_groups import Meeting, ViewGroups
from actors.rank.state.keeping import keep
from actors.rank.state.saving import PartsPort
from actors.rank.state.tracked import TrackedState, receive_state, send_state
from actors.rank.step.train_step import TrainStep
from actors.rank.telemetry.recorder import Recorder
from actors.rank.telemetry.usage import FETCHED
from fleet.errors import GroupLost, may_pass
from fleet.host.processor_time import cores_of_host
from fleet.host.scheduling import be_ordinary, be_prompt, be_steady
from fleet.protocol import moves
from fleet.protocol.chunks import ViewState
from fleet.protocol.domains import VARIABLE, site_of
from fleet.protocol.instructions import Instruction
from fleet.protocol.levels import STORE, level_at
from fleet.protocol.moves import Arriving, Awaited, Drop, Form, Joining, KeepBeside, Move, Order, Parting, Settle, Wake
from fleet.protocol.rank_machine import Moves, RankMachine
from fleet.protocol.records import COMPUTE, REFORM, RESTORE, STANDBY
from fleet.protocol.types import Finding, StateId, View, columns
from fleet.settings.run import Timeouts


class Transfer:
    """The transfer of the state, on both ranks in a thread of its own. The state changes only after the reduction of the newcomers'
    step."""

    def __init__(self, carry: Callable[[], None], name: str) -> None:
        pool = ThreadPoolExecutor(1, name, functools.partial(be_prompt, children=True))  # a rank may wait for it before long
        self._carried = pool.submit(carry)
        pool.shutdown(wait=False)

    def join(self) -> None:
        """Wait until the state is there. Raises GroupBroken, and errors of the state itself."""
        self._carried.result()

    def end(self) -> None:
        """Wait until the transfer has ended, with or without an error."""
        wait([self._carried])


class Membership:
    """Owns the process groups, and carries out the moves of the rank machine that concern them and the state.

    The loop's thread makes it. That thread gets longer time slices once a step was committed in a view (:meth:`settled`). Three kinds of
    threads call it: the loop's, the listening thread, and one for each view that the rank joins beside the loop.

    Args:
        host: the address at which peers reach this rank.
        timeouts: bounds of any wait inside a group; the coordinator interrupts earlier when it knows of an error.
    """

    def __init__(self, client: Client, recorder: Recorder, parts: PartsPort, host: str, timeouts: Timeouts) -> None:
        self._client, self._recorder, self._parts, self.host, self._timeouts = client, recorder, parts, host, timeouts
        self._protocol = client.protocol
        self.rank_machine = RankMachine(client.protocol)
        self._groups: dict[int, Forming | Group] = {}
        self._together: dict[int, Forming | Group] = {}  # of the ranks with which this one computes shards
        self._settling: dict[int, threading.Thread] = {}
        self._stale: list[tuple[Forming | Group, threading.Thread | None]] = []
        self._transfer: Transfer | None = None
        self._receives = False
        self._fresh = True
        self._state: TrackedState | None = None
        self._train_step: TrainStep | None = None
        self._resettle_by: Meeting | None = None
        self._loop, self._steadily = threading.get_native_id(), False
        self.carriers: dict[type[Move], Callable[[Any], Any]] = {
            moves.Wait: self._wait,
            moves.Clear: self._clear_after_leaving,
            moves.Meet: self._meet,
            moves.Load: self._load,
            moves.Begin: self._begin,
            moves.Resettle: self._resettle,
            moves.Receive: self._receive,
            moves.Give: self._give,
            moves.HoldStill: self._hold_still,
            moves.Promise: self._promise,
        }
        client.on_messages = self._receive_instructions

    def serve(
        self,
        state: TrackedState,
        train: TrainStep,
        total: int,
        resettle: Meeting | None = None,
        together: int = 1,
    ) -> None:
        """Set the state that ranks give to newcomers. ``resettle``: None where each rank has all of it."""
        self._state, self._train_step, self._resettle_by = state, train, resettle
        self._protocol.sharded = resettle is not None
        self.rank_machine.serve(self, train.duties, train.vote, total, together)

    # ---- facts ---------------------------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> dict[int, float]:
        """See ``fleet.protocol.moves.Facts``, also for the following ones."""
        return self._served.contributions.losses

    @property
    def steady(self) -> bool:
        return self._served.gradients.buffers.constant

    @property
    def spares_newcomers(self) -> bool:
        return self._served.layout.spares_newcomers

    @property
    def checks(self) -> tuple[int, ...]:
        return self._served.checks

    @property
    def testimony(self) -> Finding | None:
        return self._served.verify.testimony

    @property
    def apart(self) -> str:
        return self._served.layout.apart

    def formed(self, generation: int) -> bool:
        parts = [each[generation] for each in (self._groups, self._together) if generation in each]
        return all(isinstance(part, Group) or part.done for part in parts)

    @property
    def _served(self) -> TrainStep:
        assert self._train_step is not None, "called into a view before serve()"
        return self._train_step

    @property
    def groups(self) -> ViewGroups:
        """The groups in which this rank is, of the view that it has joined. Raises GroupBroken: they were dropped."""
        return self._groups_in(self.rank_machine.view)

    def _groups_in(self, view: View) -> ViewGroups:
        whole, together = self._groups.get(view.generation), self._together.get(view.generation)
        if not isinstance(whole, Group):
            raise GroupBroken("told to leave", view.generation)
        if not self._protocol.coordinate:
            return ViewGroups(whole, whole)
        places = columns(view.members)[self._protocol.coordinate]
        return ViewGroups(whole, Subgroup(whole, places), together if isinstance(together, Group) else None)

    # ---- the rank machine ----------------------------------------------------------------------------------------------------------------

    def carry(self, steps: Moves, stop: tuple[type[Move], ...] = ()) -> Any:
        """Carry out one move after the other. Gives the first move of a kind in ``stop``, else the result of ``steps``."""
        value: Any = None
        lost: GroupLost | None = None
        while True:
            ended, move = self.resume(steps, value, lost)
            if ended or isinstance(move, stop):
                return move
            value = lost = None
            try:
                value = self.carriers[type(move)](move)
            except GroupLost as error:
                lost = error

    def resume(self, steps: Moves, value: Any = None, lost: GroupLost | None = None) -> tuple[bool, Any]:
        """(False, the next move), or (True, the result of ``steps``)."""
        with self._client.lock:
            try:
                return False, steps.send(value) if lost is None else steps.throw(lost)
            except StopIteration as end:
                return True, end.value
            finally:
                self._obey()

    def _receive_instructions(self, messages: Sequence[Instruction]) -> None:
        """From the listening thread."""
        with self._client.lock:
            self.rank_machine.receive(*messages)
            self._obey()

    def _obey(self) -> None:
        """Carry out the machine's orders and send its messages at once, before longer work: the next view waits for them."""
        while self.rank_machine.orders:
            self._do(self.rank_machine.orders.pop(0))
        if self._protocol.outbox:
            self._client.say()

    def _do(self, order: Order) -> None:
        match order:
            case Form(view):
                self._groups[view.generation] = self._form(view)
                if self._protocol.coordinate and len(view.group_of(self._protocol.member)) > 1:
                    self._together[view.generation] = self._form_together(view)
            case Settle(joining):
                name = f"fleet-settle-{joining.view.generation}"
                self._settling[joining.view.generation] = thread = threading.Thread(target=self._settle, args=(joining,), name=name)
                thread.start()
            case Drop(generation, parting):
                self._drop(generation, parting)
            case KeepBeside(kept):
                what = kept, self._served, self._parts, self._client
                threading.Thread(target=keep, args=what, name=f"fleet-keep-{kept.request}", daemon=True).start()
            case Wake(generation):
                self._hurry()
                for each in (self._groups, self._together):
                    if generation in each:
                        each[generation].interrupt("told to leave by the coordinator")

    def _form(self, view: View) -> Forming:
        return self._forming(view, view.rank_of(self._protocol.member), len(view.members))

    def _form_together(self, view: View) -> Forming:
        """A group of the ranks with which this one computes shards. They still compute when another rank of the view is lost."""
        group = view.group_of(self._protocol.member)
        return self._forming(view, group.index(view.rank_of(self._protocol.member)), len(group), f"-{group[0]}")

    def _forming(self, view: View, rank: int, size: int, part: str = "") -> Forming:
        return Forming(
            store=view.store,
            generation=view.generation,
            rank=rank,
            size=size,
            device=self._served.device,
            timeout_s=self._timeouts.progress_s,
            operation_s=self._timeouts.collective_s,
            host=self.host,
            site=site_of(os.environ.get(VARIABLE, ""), self._protocol.process.node),
            cores=cores_of_host(),
            part=part,
        )

    def _settle(self, joining: Joining) -> None:
        """Join a view, in a thread of its own."""
        steps = self.rank_machine.settle(joining)
        try:
            self.carry(steps)
        finally:
            with self._client.lock:
                steps.close()
                self._client.changed.notify_all()

    def _drop(self, generation: int, parting: Parting) -> None:
        """Drop the group of ``generation``. The loop frees its memory later: see ``_clear``."""
        part, thread = self._groups.pop(generation), self._settling.pop(generation, None)
        together = self._together.pop(generation, None)
        if parting is Parting.WITHDRAWN:
            part.interrupt("the proposal was dropped")
            if together is not None:
                together.interrupt("the proposal was dropped")
            return
        self._hurry()
        part.interrupt("left")
        self._stale.append((part, thread))
        if together is not None:  # its ranks end the shard that they compute, unless one of them does not come to the end of it
            self._stale.append((together, None))
            late = threading.Timer(self._timeouts.quiesce_s, together.interrupt, ("left",))
            late.daemon = True
            late.start()

    def settled(self) -> None:
        """A step was committed in this view: all ranks compute now."""
        with self._client.lock:
            if not self._steadily and self.rank_machine.membership is not None:
                self._steadily = True
                be_steady(self._loop)

    def _hurry(self) -> None:
        """The view changes: all ranks wait for this rank's loop. From any thread, under the lock."""
        if self._steadily:
            self._steadily = False
            be_ordinary(self._loop)

    # ---- moves: into a view, and out of it -----------------------------------------------------------------------------------------------

    def _wait(self, move: moves.Wait) -> None:
        if move.what is Awaited.CALL:
            self._recorder.switch(STANDBY if self._fresh else REFORM)
            self._clear()
        self._client.wait(move.until, move.again_s)

    def _clear_after_leaving(self, move: moves.Clear) -> None:
        if move.within_step:
            self._recorder.hold()
        self._recorder.switch(REFORM)
        self._clear()

    def _clear(self) -> None:
        with self._client.lock:
            stale, self._stale = self._stale, []
        if stale and self._transfer is not None:
            self._transfer.end()  # its group was interrupted
            self._transfer = None
        for part, thread in stale:
            if thread is not None:
                thread.join()
            if isinstance(part, Group):
                part.close()
            else:
                part.interrupt("left")
        if stale and self._train_step is not None and not self._together:
            self._train_step.layout.part()

    def _meet(self, move: moves.Meet) -> None:
        generation = move.view.generation
        if threading.get_native_id() == self._loop:
            if not move.stands_by:
                self._recorder.switch(REFORM)
            self._clear()
        with self._client.lock:
            part = self._groups.get(generation)
            beside = self._together.get(generation)
        group = part.wait() if isinstance(part, Forming) else part
        together = beside.wait() if isinstance(beside, Forming) else beside
        with self._client.lock:
            if group is None or self._groups.get(generation) not in (part, group):
                raise GroupBroken("told to leave", generation)
            self._groups[generation] = group
            if together is not None:
                self._together[generation] = together

    def joined(self) -> None:
        """This rank has joined a view, so it is in the run."""
        self._fresh = False

    def _promise(self, move: moves.Promise) -> None:
        with self._client.lock:
            group = self._groups.get(move.view.generation)
            if not isinstance(group, Group):
                raise GroupBroken("told to leave", move.view.generation)  # of two views only the later one's promise counts
            self._served.promise(group, move.shards)

    # ---- moves: the state ----------------------------------------------------------------------------------------------------------------

    def _hold_still(self, move: moves.HoldStill) -> None:
        """Before the state changes or is used, wait for the end of its transfer. Raises GroupBroken."""
        if self._transfer is None:
            return
        self._transfer.join()
        self._transfer = None
        if self._receives:
            self._recorder.switch(COMPUTE)

    def _resettle(self, move: moves.Resettle) -> ViewState:
        assert self._resettle_by is not None
        self._recorder.switch(RESTORE)
        return self._resettle_by(self.groups, move.view)

    def _give(self, move: moves.Give) -> None:
        state, train, group = self._state, self._served, self._groups_in(move.view).column
        assert state is not None
        if not train.gradients.buffers.constant:
            self._recorder.switch(RESTORE)

        def give() -> None:
            for receiver in move.receivers:
                group.send(torch.tensor([move.state.history, move.state.step, train.gradients.trained.checksum], device="cpu"), receiver)
            for receiver in move.receivers:
                send_state(group, receiver, state)

        self._receives, self._transfer = False, Transfer(give, "fleet-give")

    def _receive(self, move: moves.Receive) -> Arriving:
        """Receive the number of the coming state, and begin to receive the state."""
        state, train, view = self._state, self._served, move.view
        group = self._groups_in(view).column
        assert state is not None
        self._recorder.switch(RESTORE)
        train.reset()
        numbers = torch.empty(3, dtype=torch.int64, device="cpu")
        group.recv(numbers, move.giver)
        history, step, trained = numbers.tolist()

        def dirty() -> None:
            with self._client.lock:  # a rank that has left the view has reported its state
                self.rank_machine.receiving(view)

        def take() -> None:
            receive_state(group, move.giver, state, dirty)
            with self._client.lock:
                self.rank_machine.received(view, StateId(history, step))
                self._obey()

        self._receives, self._transfer = True, Transfer(take, "fleet-take")
        return Arriving(StateId(history, step), trained == train.gradients.trained.checksum)

    def _load(self, move: moves.Load) -> tuple[str, list[torch.Tensor]]:
        """Load the view's checkpoint. Raises GroupBroken when a node with it is lost, or a store fails for a while.

        The coordinator then names another checkpoint, or the same again. A permanent error of a store, or a missing checkpoint, ends this
        rank.
        """
        view = move.view
        assert view.checkpoint is not None
        self._served.reset()
        self._recorder.switch(RESTORE)
        try:
            loaded = self._parts.load(view.checkpoint)
        except OSError as error:
            if level_at(view.checkpoint) == STORE and not may_pass(error):
                raise
            raise GroupBroken(f"the checkpoint of {view.state} cannot be read: {error}", view.generation) from error
        if level_at(view.checkpoint) == STORE:
            FETCHED.count(sum(tensor.nbytes for tensor in loaded[1]))
        return loaded

    def _begin(self, move: moves.Begin) -> None:
        assert self._state is not None
        self._served.reset()
        if move.loaded is not None:
            self._state.load(*move.loaded)
        self._served.begin(move.view.state)
