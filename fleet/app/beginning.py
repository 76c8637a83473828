"""Terminal lines from the command to a run's first step: each stage as it begins, and every few seconds that it still goes on."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from fleet.app.waiting import EVERY_S, Waiting
from fleet.protocol.records import Committed, ProcessUp, Record, ViewPublished


class Beginning(Waiting):
    """Names the stage that the command waits for, until ``over``. Use as a context manager, in the process that waits.

    Args:
        console: prints whole lines.
        clock: seconds that do not go back.
    """

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        super().__init__(console, clock, most_s=EVERY_S)
        self._up = 0

    def say(self, what: str) -> None:
        """The command waits for ``what`` from now on."""
        with self._lock:
            self._what = what
            self._print(what)

    def take(self, record: Record) -> None:
        """From the journal: the ranks that are up, the first view, and the first committed step, with which the wait is over."""
        match record:
            case ProcessUp():
                self._up += 1
                self._what = f"{self._up} rank{'s are' if self._up > 1 else ' is'} up"
            case ViewPublished():
                self._what = "the first view forms"
            case Committed():
                self.over()
