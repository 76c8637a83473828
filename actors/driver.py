"""The one loop that performs what the machine decides. The edge of the pure core: here are clocks, threads and ports, and no decisions."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable

from fleet.host.clock import Clock
from fleet.machine import audit
from fleet.machine.core import FleetMachine
from fleet.protocol.causes import EndWhy
from fleet.protocol.events import CheckpointDurable, CheckpointFailed, Event, StopRequested, Tick
from fleet.protocol.instructions import CommitCheckpoint, Conclude, EndRun, Instruction, Propose, Publish, Write
from fleet.protocol.levels import level_at
from fleet.protocol.ports import CheckpointPort, JournalPort, MembersPort
from fleet.protocol.records import Received

log = logging.getLogger("actors.driver")
TICK_S = 0.1
LATE_S = 0.001
LOOK_S = 1.0
"""From one look at the journal to the next."""
MAKE_ROOM = "Make room, or put the folder back, and go on with fleet run --resume"


class Driver:
    """Feeds events to a machine and performs its instructions, in order, in one asyncio loop.

    Args:
        machine: the decision core.
        clock: the run's clock.
        journal: where ``Write`` goes. It is flushed before anything else is performed, so that no rank hears of what could be forgotten.
        members: carries instructions to ranks.
        checkpoints: puts manifests in place; called in a worker thread.
        on_end: told once, when the run has ended.
        keep: keeps a text beside the journal, and returns where; "" when it cannot.
    """

    def __init__(
        self,
        machine: FleetMachine,
        clock: Clock,
        journal: JournalPort,
        members: MembersPort,
        checkpoints: CheckpointPort,
        on_end: Callable[[EndRun], None],
        keep: Callable[[str], str] = lambda text: "",
    ) -> None:
        self.machine, self.clock = machine, clock
        self._journal, self._members, self._checkpoints, self._on_end, self._keep = journal, members, checkpoints, on_end, keep
        self._background: set[asyncio.Task[None]] = set()
        self._lost = ""
        self._looked_s = clock.now_s()
        self._audit, self._wrong = audit.StateAudit(clock.now_s()), ""

    def submit(self, event: Event) -> None:
        """Handle one event now; must be called in the loop's own thread."""
        written = False
        for instruction in self.machine.handle(event, self.clock.now_s()):
            if isinstance(instruction, Write):
                self.write(functools.partial(self._journal.append, instruction.record))
                written = written or not isinstance(instruction.record, Received)  # nothing is decided by what was heard
                continue
            if written:
                self.write(self._journal.flush)
                written = False
            self._perform(instruction)
        if written:
            self.write(self._journal.flush)

    def write(self, do: Callable[[], object]) -> bool:
        """``do()`` writes to the journal. False when that fails: then the run stops in order, and is not led into another view."""
        try:
            do()
        except OSError as error:
            if not self._lost:
                self._lost = f"a record of this run could not be written: {error}. {MAKE_ROOM}"
                log.critical("%s", self._lost)
                self.submit(StopRequested(self._lost, why=EndWhy.JOURNAL_FAILED))
            return False
        return True

    def _look_at_journal(self) -> None:
        """A disk that is full, and a journal that is gone, end the run in order while that can still be written."""
        now_s = self.clock.now_s()
        if now_s - self._looked_s < LOOK_S or self._lost or self.machine.state.ending.record is not None:
            return
        self._looked_s = now_s
        if trouble := self._journal.trouble:
            self.submit(StopRequested(f"{trouble}. {MAKE_ROOM}", why=EndWhy.JOURNAL_FAILED))

    def _look_at_state(self) -> None:
        """A state that contradicts itself ends the run in order, by name; at once, where that does not come about within the grace."""
        state, now_s = self.machine.state, self.clock.now_s()
        if state.ending.record is not None or not self._audit.due(now_s):
            return
        if self._wrong:
            self.submit(StopRequested(self._wrong, self._wrong, EndWhy.CONTRADICTION))
            return
        found = audit.found_in(state)
        self._audit.done(now_s, self.clock.now_s() - now_s)
        if found:
            self._wrong = audit.reason(found, self._keep(audit.in_text(state)))
            log.critical("%s", self._wrong)
            self._audit.wait(now_s + state.settings.timeouts.grace_s)
            self.submit(StopRequested(self._wrong, why=EndWhy.CONTRADICTION))

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case CommitCheckpoint():
                task = asyncio.get_running_loop().create_task(self._commit(instruction))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            case EndRun() if self._lost and not self.write(self._journal.flush):  # no room was made meanwhile
                self._on_end(dataclasses.replace(instruction, status="failed", reason=self._lost, why=EndWhy.JOURNAL_FAILED))
            case EndRun():
                self._on_end(instruction)
            case Publish() | Propose() | Conclude() if self._lost:
                log.warning("%s is not said, as its record is not written", type(instruction).__name__)
            case _:
                self._members.send(instruction)

    async def _commit(self, order: CommitCheckpoint) -> None:
        level = level_at(order.place)
        try:
            size = await asyncio.to_thread(self._checkpoints.commit, order)
        except Exception as error:  # noqa: BLE001 - whatever fails in a store, to the run this checkpoint does not exist
            log.warning("checkpoint %s was not committed: %r", order.checkpoint, error)
            self.submit(CheckpointFailed(order.checkpoint, f"{type(error).__name__}: {error}", level))
            return
        latency_s = self.clock.now_s() - order.requested_at_s
        self.submit(CheckpointDurable(order.checkpoint, order.state, size, order.blocked_s, latency_s, level))

    async def stop(self) -> None:
        """Leave what is being committed to itself: nobody hears of it any more."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def tick_after(self, wait_s: float) -> None:
        """One tick beside the regular ones: something is due then, and nobody should wait for the next."""
        asyncio.get_running_loop().call_later(wait_s + LATE_S, self.submit, Tick())

    async def tick_forever(self) -> None:
        while True:
            self.submit(Tick())
            self._look_at_journal()
            self._look_at_state()
            await asyncio.sleep(TICK_S)
