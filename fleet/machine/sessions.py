"""Sessions of a run, from one resume to the next: which sessions failed again where the run had failed before.

A checkpoint may be whole and bad: the run fails from it each time. A session that began from a checkpoint, failed, and committed no step
beyond all earlier ones is a *return*. The resume after the first return begins from an older checkpoint. After the second return the run is
not resumed, until its script has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fleet.protocol.causes import EndWhy
from fleet.protocol.levels import STORE
from fleet.protocol.records import (
    CheckpointRecord,
    Committed,
    HistoryBegun,
    Received,
    Record,
    Resumed,
    RunEnded,
    RunStarted,
    ViewPublished,
    configuration,
    section,
)
from fleet.protocol.types import StateId

MOST = 2
"""Number of returns after which the run is not resumed unchanged."""
MANY = 100
"""Number of checkpoints that are remembered. A store keeps fewer, apart from guarded ones."""


@dataclass(frozen=True, slots=True)
class FailedSession:
    """A session that is a return: its first checkpoint, its last step, the reason of its end, and its first state."""

    checkpoint: str
    step: int
    reason: str
    state: StateId | None


class Sessions:
    """Folds the records of a run: when they are written, and again after a restart of the coordinator.

    Attributes:
        returns: the returns since the last commit beyond all earlier ones, oldest first.
        led_on: the last checkpoint from which the run went beyond all earlier steps; None before there was one.
    """

    def __init__(self) -> None:
        self.returns: list[FailedSession] = []
        self.led_on: StateId | None = None
        self._origin: StateId | None = None
        self._before: StateId | None = None
        self._began_from = ""
        self._began_at: StateId | None = None
        self._older: StateId | None = None
        self._durable: deque[StateId] = deque(maxlen=MANY)
        self._furthest = self._reached = 0
        self._beyond, self._script = True, ""

    @property
    def guarded(self) -> Collection[StateId]:
        """Checkpoints that newer ones must not push out, since the run may still fail from the newer ones.

        The checkpoint before a session's first one is guarded, too. Attempts within the session save newer ones, and no older one would be
        left.
        """
        began = [each.state for each in self.returns] + [self._began_at, None if self._beyond else self._older]
        return {state for state in (self.led_on, self._origin, *began) if state is not None}

    def note_all(self, records: Iterable[Record]) -> Sessions:
        """Take in all records of a journal, or its newest ones."""
        for record in records:
            self.note(record)
        return self

    def note(self, record: Record) -> None:
        match record:
            case RunStarted(config=config):
                self._script = str(section(configuration(config), "made_of").get("script_sha256", ""))
            case Resumed(gap=True, script_sha256=script):
                self._begin(script)
            case HistoryBegun(from_state=state):
                self._before = state
            case ViewPublished(view=view) if view.checkpoint is not None and "/" not in view.checkpoint:
                if not self._began_from:
                    self._began_from, self._began_at = view.checkpoint, self._before
                    self._older = max((state for state in self._durable if self._before and state < self._before), default=None)
                self._origin, self._reached = self._before, view.state.step
            case Committed(state=state):
                self._come(state.step)
            case CheckpointRecord(phase="durable", state=state, level=level):
                self._come(state.step)
                if level == STORE:
                    self._durable.append(state)
            case CheckpointRecord(phase="withdrawn", state=state) if state in self._durable:
                self._durable.remove(state)
            case Received(what="Raised", step=step):  # the journal may lack the last commits before it
                self._come(step)
            case RunEnded(why=EndWhy.TRAIN_RAISED | EndWhy.LOOP_WRONG | EndWhy.CRASH_LOOP):  # other ends are not the checkpoint's fault
                self._fail(record)

    def _begin(self, script: str) -> None:
        self._origin, self._began_at, self._older, self._began_from, self._beyond = None, None, None, "", False
        if script and script != self._script:
            self.returns, self._script = [], script

    def _fail(self, ended: RunEnded) -> None:
        if self._began_from and not self._beyond:
            self.returns.append(FailedSession(self._began_from, self._reached, ended.reason, self._began_at))

    def _come(self, step: int) -> None:
        """The run has committed ``step`` steps."""
        self._reached = max(self._reached, step)
        if step > self._furthest:
            self._furthest, self._beyond, self.returns = step, True, []
            self.led_on = self._origin or self.led_on

    def older(self, kept: Iterable[StateId]) -> StateId | None:
        """The first state after one return: ``led_on``, else the oldest state of ``kept``. None: there is no older one."""
        if len(self.returns) != MOST - 1:
            return None
        failed = self.returns[-1].state
        known = sorted(state for state in kept if failed is None or state < failed)
        return self.led_on if self.led_on in known else next(iter(known), None)


def in_words(returns: Iterable[FailedSession]) -> str:
    """The returns in words: their checkpoints, their last step, and the reason."""
    listed = list(returns)
    named = " and ".join(dict.fromkeys(each.checkpoint for each in listed))
    return f"it went on from {named}, and came to step {listed[-1].step} each time, no further than before: {listed[-1].reason}"
