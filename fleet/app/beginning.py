"""What a terminal shows from the command to a run's first step: what is done, and every few seconds that it still goes on."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from fleet.app.waiting import EVERY_S, Waiting
from fleet.protocol.records import Committed, ProcessUp, Record, ViewPublished


class Beginning(Waiting):
    """Says what is waited for, until ``over``. Use as a context manager, in the process that waits.

    Args:
        console: prints whole lines.
        clock: seconds that do not go back.
    """

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        super().__init__(console, clock, most_s=EVERY_S)
        self._up = 0

    def say(self, what: str) -> None:
        """``what`` is waited for from now on."""
        with self._lock:
            self._what = what
            self._print(what)

    def take(self, record: Record) -> None:
        """What the journal tells: how many ranks are up, that they form a view, and that the first step is taken."""
        match record:
            case ProcessUp():
                self._up += 1
                self._what = f"{self._up} rank{'s are' if self._up > 1 else ' is'} up"
            case ViewPublished():
                self._what = "the first view forms"
            case Committed():
                self.over()
