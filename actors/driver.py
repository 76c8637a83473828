"""The one loop that carries out the machine's decisions. The edge of the pure core: it has clocks, threads and ports, and no decisions."""

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
from fleet.protocol.holding import TakenOver
from fleet.protocol.instructions import CommitCheckpoint, Conclude, EndRun, Instruction, Propose, Publish, Write
from fleet.protocol.levels import level_at
from fleet.protocol.ports import CheckpointPort, JournalPort, MembersPort
from fleet.protocol.records import Received

log = logging.getLogger("actors.driver")
TICK_S = 0.1
LATE_S = 0.001
LOOK_S = 1.0
"""The interval between two checks of the journal."""
MAKE_ROOM = "Make room, or put the folder back, and go on with fleet run --resume"


class Driver:
    """Gives events to a machine and carries out its instructions, in order, in one asyncio loop.

    Args:
        machine: the decision core.
        clock: the run's clock.
        journal: takes the records of ``Write``. It is flushed before the next instruction, so that no rank learns of a record that could be
            lost.
        members: carries instructions to ranks.
        checkpoints: puts manifests in place; called in a worker thread.
        on_end: called once, when the run has ended.
        keep: writes a text beside the journal, and returns its place; "" when it cannot.
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
        """Handle one event now. Call it in the loop's own thread."""
        written = False
        for instruction in self.machine.handle(event, self.clock.now_s()):
            if isinstance(instruction, Write):
                self.write(functools.partial(self._journal.append, instruction.record))
                written = written or not isinstance(instruction.record, Received)  # no decision depends on these records
                continue
            if written:
                self.write(self._journal.flush)
                written = False
            self._perform(instruction)
        if written:
            self.write(self._journal.flush)

    def write(self, do: Callable[[], object]) -> bool:
        """Call ``do()``, which writes to the journal. False: it failed, so the run stops in order, and gets no further view."""
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
        """End the run in order when the disk is almost full or the journal is gone, while the end can still be written."""
        now_s = self.clock.now_s()
        if now_s - self._looked_s < LOOK_S or self._lost or self.machine.state.ending.record is not None:
            return
        self._looked_s = now_s
        if trouble := self._journal.trouble:
            self.submit(StopRequested(f"{trouble}. {MAKE_ROOM}", why=EndWhy.JOURNAL_FAILED))

    def _look_at_state(self) -> None:
        """End the run in order when its state contradicts itself, and name the contradiction. End it at once if it is still there after the
        grace."""
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
            case EndRun() if self._lost and not self.write(self._journal.flush):  # the disk is still full
                self._on_end(dataclasses.replace(instruction, status="failed", reason=self._lost, why=EndWhy.JOURNAL_FAILED))
            case EndRun():
                self._on_end(instruction)
            case Publish() | Propose() | Conclude() if self._lost:
                log.warning("%s is not sent, as its record is not written", type(instruction).__name__)
            case _:
                self._members.send(instruction)

    async def _commit(self, order: CommitCheckpoint) -> None:
        level = level_at(order.place)
        try:
            size = await asyncio.to_thread(self._checkpoints.commit, order)
        except TakenOver as error:
            self.submit(StopRequested(str(error), str(error), EndWhy.TAKEN_OVER))
            return
        except Exception as error:  # noqa: BLE001 - after any error of a store this checkpoint does not exist
            log.warning("checkpoint %s was not committed: %r", order.checkpoint, error)
            self.submit(CheckpointFailed(order.checkpoint, f"{type(error).__name__}: {error}", level))
            return
        latency_s = self.clock.now_s() - order.requested_at_s
        self.submit(CheckpointDurable(order.checkpoint, order.state, size, order.blocked_s, latency_s, level))

    async def stop(self) -> None:
        """Stop waiting for checkpoints that are being committed: their results are no longer reported."""
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def tick_after(self, wait_s: float) -> None:
        """Add one tick to the regular ones: a time-out is due then, and the ranks should not wait for the next regular tick."""
        asyncio.get_running_loop().call_later(wait_s + LATE_S, self.submit, Tick())

    async def tick_forever(self) -> None:
        while True:
            self.submit(Tick())
            self._look_at_journal()
            self._look_at_state()
            await asyncio.sleep(TICK_S)
